"""The devices on which stages run, and what they read of other devices: it is copied once for all microbatches."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import keep_alive
from devicemap._tensorflow.gradients import order_of_gradients
from devicemap.compile.audit import Treatment
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.replicas import Replicas, home_of
from devicemap.compile.trace import Traced
from devicemap.pipelines.stages import Stage, TracedStage


@dataclass(frozen=True)
class StageReplica:
    """A stage on its device in a replica of the pipeline."""

    device: str
    share: range
    """The indices of the microbatches of the replica."""

    traces: Sequence[Traced]
    """The trace for each of them. The backward pass of a trace belongs to one device."""

    captures: dict[Any, Any]
    """Replacements of captures of the traces, by `Tensor.ref()` of the latter."""

    assigned: Sequence[Any]
    """Ops for which calls wait."""


def replicas_of(
    stage: Stage, traced: TracedStage, shares: Sequence[range], written: Container[int]
) -> list[StageReplica]:
    """Return a stage in each replica, in the graph that is being built. The first replica has the variables.

    `shares`: the microbatches of each replica. `written`: identities of the handles that some stage writes.
    """
    first, devices = traced.traced, stage.devices[: len(shares)]
    captures: list[tuple[dict[Any, Any], list[Any]]] = [({}, [])] * len(shares)
    shared = first if len(shares) > 1 else _with_copies(first, devices[0], written)
    if shared is not None:
        order_of_gradients(first.concrete, [])  # makes tapes watch the variables
        spec = CallSpec.of_shards(len(shares), Engine.INLINE, gradient_order=1)
        replicas = Replicas(shared, devices, spec)
        keep_alive(replicas)
        values = replicas.values(range(len(shares)))
        for r, device in enumerate(devices):
            with tf.device(device):
                captures[r] = replicas.create(r, values)
    found = []
    for r, (device, share) in enumerate(zip(devices, shares)):
        if first.audit.keeps_state(differentiable=True):
            traces = [stage.traced_again(traced.given) for _ in share]
        else:
            traces = [(stage.traced(traced.given, r) if r else traced).traced] * len(share)
        found.append(StageReplica(device, share, traces, *captures[r]))
    return found


def _with_copies(traced: Traced, device: str, written: Container[int]) -> Traced | None:
    """Return a trace in whose audit variables stay unless they are copied to a device; `None` if nothing is copied.

    Tensors and variables of other devices are copied, but not variables that a stage writes, nor tables of which it only
    looks up rows. These may be too large for the device.
    """
    treatments = []
    for capture, treatment, is_table in zip(traced.captures, traced.audit.treatments, traced.audit.tables):
        stays = treatment is not None and (is_table or treatment is not Treatment.READ or id(capture) in written)
        treatments.append(Treatment.STAYS if stays else treatment)
    away = [capture.dtype != tf.variant and home_of(capture) != device for capture in traced.captures]
    if not any(is_away and treatment is not Treatment.STAYS for treatment, is_away in zip(treatments, away)):
        return None
    return replace(traced, audit=replace(traced.audit, treatments=tuple(treatments)))
