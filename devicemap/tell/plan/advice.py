"""What stands in the way of parallelism, and what to do about it: facts of a plan -> plain words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from devicemap.events import short_name
from devicemap.tell.render import counted, listed, size_text

if TYPE_CHECKING:
    from devicemap.tell.plan.plan import Plan

_LARGE_SHARE = 0.5
"""Captured variables are worth a sentence where they are more than this part of what travels."""

_LARGE_BYTES = 2**20
"""And more than this: smaller ones cost less than a call does."""


def advise(plan: Plan) -> tuple[str, ...]:
    """A sentence for each thing that is worth it; what costs most comes first."""
    judges: Sequence[Callable[[Plan], Iterator[str]]] = (
        _about_order, _about_strays, _about_python, _about_devices, _about_parts, _about_memory, _about_loops,
        _about_updates, _about_traffic,
    )  # fmt: skip
    return tuple(sentence for judge in judges for sentence in judge(plan))


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


def _about_strays(plan: Plan) -> Iterator[str]:
    unserved = [stray for stray in plan.strays if stray.reason in ("no kernel", "int32")]
    for kind, instead in dict.fromkeys((stray.device, stray.instead) for stray in unserved):
        ops = [stray.op for stray in unserved if (stray.device, stray.instead) == (kind, instead)]
        verb = "has" if len(ops) == 1 else "have"
        yield (
            f"{listed(ops)} {verb} no kernel on {kind}: do this in the input pipeline (Dataset.map) instead"
            if instead is None
            else f"{listed(ops)} {verb} no kernel for int32 on {kind} itself, and the host computes it: cast to {instead}"
        )
    places = dict.fromkeys(stray.device for stray in plan.strays if stray.reason == "placed by fn")
    for place in places:
        ops = [stray.op for stray in plan.strays if (stray.device, stray.reason) == (place, "placed by fn")]
        yield (
            f"fn places {listed(ops)} on {short_name(place)} itself, and all devices send their rows there: take tf.device out "
            "of fn"
        )


def _about_python(plan: Plan) -> Iterator[str]:
    if plan.python_ops and len(plan.devices) > 1:
        yield (
            f"{listed(plan.python_ops)} calls Python, where all devices take turns: use TensorFlow ops instead where it "
            "computes, or do it in the input pipeline"
        )


def _about_devices(plan: Plan) -> Iterator[str]:
    idle = sum(device.rows == 0 for device in plan.devices)
    if plan.way == "one graph" and idle and plan.rows is not None:
        stay = "stays" if idle == 1 else "stay"
        yield f"{counted(plan.rows, 'row')} for {len(plan.devices)} devices: {counted(idle, 'device')} {stay} idle"
    elif plan.way == "chunks" and isinstance(plan.batch_size, int) and plan.rows is not None:
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


def _about_memory(plan: Plan) -> Iterator[str]:
    rows = plan.rows if plan.way == "one graph" else plan.batch_size
    for each in plan.memory:
        need = each.peak_bytes(rows) if isinstance(rows, int) else None
        if need is not None and each.limit_bytes is not None and need > each.limit_bytes:
            cure = "pass batch_size" if plan.way == "one graph" else "use a smaller batch_size"
            yield (
                f"{short_name(each.device)} takes up to {size_text(need)} at once, and has {size_text(each.limit_bytes)}: "
                f"{cure}; {counted(plan.largest_batch() or 0, 'row')} at once fit"
            )


def _about_loops(plan: Plan) -> Iterator[str]:
    if not (plan.batched or plan.vectorized or plan.ordered or plan.reason == "vectorize=False"):
        yield f"fn is mapped row by row because {plan.reason}; a fn of a whole batch (batched=True) may be faster"


def _about_updates(plan: Plan) -> Iterator[str]:
    from devicemap.tell.plan.plan import Handling

    away = {transfer.what for transfer in plan.transfers}
    for thing in plan.captured:
        if thing.name in away and thing.handling in (Handling.ATOMIC, Handling.LOOKED_UP):
            act = "updates" if thing.handling is Handling.ATOMIC else "looks things up in"
            often = "for each batch" if plan.batched else "for each row"
            yield (
                f"fn {act} `{thing.name}`, which lives on {short_name(thing.device)}, and the other devices go there {often}: "
                "this pays only where fn does much else"
            )


def _about_traffic(plan: Plan) -> Iterator[str]:
    names = {thing.name for thing in plan.captured}
    of_variables = sum(t.bytes_per_call or 0 for t in plan.transfers if t.what in names)
    everything = sum(t.bytes_per_call or 0 for t in plan.transfers)
    if plan.way == "one graph" and of_variables > max(_LARGE_BYTES, _LARGE_SHARE * everything):
        yield (
            f"{size_text(of_variables)} of the {size_text(everything)} that travel in a call are captured variables: pass "
            "more rows per call"
        )
