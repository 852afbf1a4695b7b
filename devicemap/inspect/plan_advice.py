"""What stands in the way of parallelism, and what to do about it: facts of a plan -> plain words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from devicemap.compile.vectorize import may_be_forced
from devicemap.events import short_name
from devicemap.inspect.render import counted, listed, size_text

if TYPE_CHECKING:
    from devicemap.inspect.plan import Plan

_LARGE_BYTES = 2**20
"""Copies of fewer bytes cost less than a call does."""


def advise(plan: Plan) -> tuple[str, ...]:
    """A sentence for each thing that is worth it; what costs most comes first."""
    judges: Sequence[Callable[[Plan], Iterator[str]]] = (
        _about_order, _about_python, _about_devices, _about_parts, _about_loops, _about_updates, _about_copies,
    )  # fmt: skip
    return tuple(sentence for judge in judges for sentence in judge(plan))


def reason_for_loop(batched: bool, vectorized: bool, ordered: bool, reason: str) -> str | None:
    """Why rows run one by one; `None` if they do not, or if the user asked for it."""
    return None if batched or vectorized or ordered or reason == "vectorize=False" else reason


def remedies_for_loop(reason: str) -> str:
    """The advice for rows that run one by one, with the remedies in the order in which to try them."""
    remedies = ["use another op there, or pass batched=True and a fn of a whole batch"]
    if may_be_forced(reason):
        remedies.insert(0, "pass vectorize=True, and compare the results with DeviceMap.verify")
    return f"rows run one by one because {reason}: {'; or else '.join(remedies)}"


def _about_order(plan: Plan) -> Iterator[str]:
    if not plan.ordered or len(plan.devices) < 2:
        return
    names = listed([f"`{name}`" for name in plan.ordered])
    verb, it = ("is", "it") if len(plan.ordered) == 1 else ("are", "them")
    keras = any(name.rpartition("/")[2].startswith("moving_") for name in plan.ordered)
    cure = (
        "call batch normalisation with training=False"
        if keras
        else "if the order does not matter, use assign_add of a tf.Variable (not one of Keras's), and do not read its value; "
        f"or return what changes {it}, and update {it} after the call"
    )
    yield (
        f"{names} {verb} written in a way that depends on order (as in v.assign(g(v))), so the devices work one after "
        f"another, in row order: {cure}"
    )


def _about_python(plan: Plan) -> Iterator[str]:
    if plan.python_ops and len(plan.devices) > 1:
        yield (
            f"{listed(plan.python_ops)} calls Python, where all devices take turns: use TensorFlow ops instead where it "
            "computes, or do it in the input pipeline"
        )


def _about_devices(plan: Plan) -> Iterator[str]:
    idle = sum(device.rows == 0 for device in plan.devices)
    if plan.engine == "one graph" and idle and plan.rows is not None:
        stay = "stays" if idle == 1 else "stay"
        why = ""
        if plan.python_ops and plan.rows > len(plan.devices) - idle:
            why = ", as each call of Python holds a thread: use tf.config.threading.set_inter_op_parallelism_threads"
        yield f"{counted(plan.rows, 'row')} for {len(plan.devices)} devices: {counted(idle, 'device')} {stay} idle{why}"
    elif plan.engine == "chunks" and isinstance(plan.batch_size, int) and plan.rows is not None:
        chunks = -(-plan.rows // plan.batch_size)
        if 0 < chunks < len(plan.devices) and not plan.ordered:
            yield (
                f"{counted(plan.rows, 'row')} in chunks of up to {plan.batch_size} are {chunks} for "
                f"{len(plan.devices)} devices: use a smaller batch_size"
            )


def _about_parts(plan: Plan) -> Iterator[str]:
    for gpu in dict.fromkeys(device.gpu for device in plan.devices if device.gpu is not None):
        parts = [short_name(device.device) for device in plan.devices if device.gpu == gpu]
        if len(parts) > 1:
            yield f"{listed(parts)} are parts of one GPU, where large kernels take turns: they may be no faster than one"


def _about_loops(plan: Plan) -> Iterator[str]:
    reason = reason_for_loop(plan.batched, plan.vectorized, bool(plan.ordered), plan.reason)
    if reason is not None:
        yield remedies_for_loop(reason)


def _about_updates(plan: Plan) -> Iterator[str]:
    from devicemap.inspect.plan import Handling

    for thing in plan.captured:
        away = any(device.device != thing.device for device in plan.devices)
        if away and thing.handling in (Handling.ATOMIC, Handling.LOOKED_UP):
            act = "updates" if thing.handling is Handling.ATOMIC else "looks things up in"
            often = "for each batch" if plan.batched else "for each row"
            yield (
                f"fn {act} `{thing.name}`, which lives on {short_name(thing.device)}, and the other devices go there {often}: "
                "this pays only where fn does much else"
            )


def _about_copies(plan: Plan) -> Iterator[str]:
    from devicemap.inspect.plan import Handling

    copied = sum(thing.size_bytes or 0 for thing in plan.captured if thing.handling is Handling.COPIED)
    rows = (plan.rows or 0) * ((plan.bytes_per_row or 0) + (plan.result_bytes_per_row or 0))
    if plan.engine == "one graph" and copied > max(_LARGE_BYTES, rows):
        yield (
            f"each call copies {size_text(copied)} of captured variables to each other device, more than the "
            f"{size_text(rows)} of its rows and results: pass more rows per call"
        )
