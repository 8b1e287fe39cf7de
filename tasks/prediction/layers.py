"""Writes out the trace of a model with many equal layers, from the traces of two small models.

Tracing takes time for each layer, and all layers do the same. Two models are traced that differ by
one layer, such as 3 and 4 (with `checkpointing: groups:K`, by one group of K layers). What the
larger one does in addition is what each further layer does:

1. **Align** the storages that the two traces create, by size and label. Both begin alike. Where
   they first differ, the larger trace has a block that the smaller one lacks. This block must equal
   the block before it: it is one more *repetition*. Behind it both are alike again, up to the next
   such block (an optimizer that works on lists has several):

       small:  embedding  layer layer layer        norm head
       large:  embedding  layer layer layer layer  norm head

   Each storage now has a place, such as "the third of a layer", and a repetition.
2. Align the events, which create or release a storage, by the place of the storage.
3. Find the **law** of each event: which repetition of its place it creates or releases. It is
   `first + slope * n + shift * more`, in the n-th repetition of the event, with `more` additional
   layers. In the forward pass the slope is 1. In the backward pass it is -1, because the last layer
   is released first. Every repetition in both traces must follow the law. With 3 and 4 layers these
   may be as few as the three unknowns; the order of creation and the bounds are checked as well.
4. Write out all places and all laws for more layers.

FLOPs and sizes of saved tensors grow by the same amount with each layer. Where anything does not
fit, `Unlike` is raised, and the whole model must be traced. Two traces cannot show that, for
example, every sixth layer differs: use this only for models that build all layers alike.

Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tasks.prediction.replay import STEPS, Label, Step, TensorLifetime, Trace
from tasks.spec.tables import Sample


class Unlike(Exception):
    """The larger trace is not the smaller one with one more repetition of a layer."""


class TraceSection(NamedTuple):
    """Neighbouring items of a sequence: `repetitions` times `length` items.

    repetitions: in the smaller trace. growth: 1 if each additional layer is one more repetition,
        otherwise 0.
    """

    length: int
    repetitions: int
    growth: int


Spans = list[tuple[Step, TensorLifetime, TensorLifetime]]  # of the smaller and the larger trace


def write_out(small: Trace, large: Trace, more: int) -> Trace:
    """Return the trace of a model with `more` additional layers. `large` has one more than `small`.

    Raise Unlike if that does not follow from the two.
    """
    spans = _paired_spans(small, large)
    sections = _storage_sections(small, large, spans)
    storages = [_Layout(sections, layers) for layers in (0, 1, more)]
    places = [layout.places() for layout in storages[:2]]
    trace = Trace()
    examples = storages[2].filled([indices[0] for indices in storages[0].indices])
    trace.sizes_bytes += [small.sizes_bytes[example] for example in examples]
    trace.labels += [small.labels[example] for example in examples]
    for step, span, larger_span in spans:
        one, other = _Events(span.events, places[0]), _Events(larger_span.events, places[1])
        events = _written_events(one, other, storages[2], more)
        trace.spans[step].append(TensorLifetime(span.phase, events))
    created = [event for step in STEPS for event in trace.events(step) if event >= 0]
    if created != list(range(len(trace.labels))):
        raise Unlike("the storages are created in another order")
    trace.flops += _written_samples(small.flops, large.flops, more)
    trace.saved += _written_samples(small.saved, large.saved, more)
    if small.module_bytes.keys() != large.module_bytes.keys():
        raise Unlike("the traces have other modules")
    for name, nbytes in small.module_bytes.items():
        trace.module_bytes[name] = nbytes + (large.module_bytes[name] - nbytes) * more
    trace.eager_functions |= large.eager_functions
    trace.unfollowed |= large.unfollowed
    trace.caveats |= large.caveats
    return trace


def align(small: Sequence[int], large: Sequence[int]) -> list[TraceSection]:
    """Return the sections of two sequences that differ by one more repetition in some of them.

    Raise Unlike if there are none.
    """
    sections = _aligned(small, large)
    if sections is None:
        raise Unlike("the traces do not differ by repetitions")
    return sections


def _aligned(small: Sequence[int], large: Sequence[int]) -> list[TraceSection] | None:
    begin = _common_prefix(small, large)
    if begin == len(small) == len(large):
        return [TraceSection(begin, 1, 0)]
    for length in range(1, min(begin, len(large) - len(small)) + 1):
        end = begin + length
        # Most lengths fail here, without a comparison of blocks.
        if (
            large[begin] != large[begin - length]
            or large[end : end + 1] != small[begin : begin + 1]
        ):
            continue
        repetitions = _repetitions_at_end(small[:begin], large[begin:end])
        if not repetitions:
            continue
        rest = _aligned(small[begin:], large[end:])
        if rest is not None:
            alike = TraceSection(begin - length * repetitions, 1, 0)
            return [alike, TraceSection(length, repetitions, 1), *rest]
    return None


def _common_prefix(small: Sequence[int], large: Sequence[int]) -> int:
    """Return the number of items with which both sequences begin."""
    for index, (one, other) in enumerate(zip(small, large, strict=False)):
        if one != other:
            return index
    return min(len(small), len(large))


def _repetitions_at_end(items: Sequence[int], block: Sequence[int]) -> int:
    """Return how often the block is repeated at the end of the items."""
    count, end = 0, len(items)
    while end >= len(block) and items[end - len(block) : end] == block:
        end -= len(block)
        count += 1
    return count


class _Layout:
    """The order of a sequence of sections with `more` additional layers.

    indices: by place, the indices in the sequence of its repetitions.
    """

    def __init__(self, sections: Iterable[TraceSection], more: int) -> None:
        self.indices: list[range] = []
        self.length = 0
        for section in sections:
            repetitions = section.repetitions + section.growth * more
            end = self.length + section.length * repetitions
            for offset in range(section.length):
                self.indices.append(range(self.length + offset, end, section.length))
            self.length = end

    def filled(self, values: Sequence[int]) -> list[int]:
        """Return the sequence with these values, one for each place."""
        items = [0] * self.length
        for value, indices in zip(values, self.indices, strict=True):
            items[_slice(indices)] = [value] * len(indices)
        return items

    def places(self) -> list[tuple[int, int]]:
        """Return the place and the repetition of each item of the sequence."""
        found = [(0, 0)] * self.length
        for place, indices in enumerate(self.indices):
            for repetition, index in enumerate(indices):
                found[index] = place, repetition
        return found


class _Events:
    """The events of a span.

    places: of the storages, inverted (~) when they are released. repetitions: of the storages.
    """

    def __init__(self, events: Iterable[int], storages: Sequence[tuple[int, int]]) -> None:
        self.places: list[int] = []
        self.repetitions: list[int] = []
        for event in events:
            place, repetition = storages[max(event, ~event)]
            self.places.append(place if event >= 0 else ~place)
            self.repetitions.append(repetition)


def _paired_spans(small: Trace, large: Trace) -> Spans:
    spans: Spans = []
    for step in STEPS:
        if [span.phase for span in small.spans[step]] != [span.phase for span in large.spans[step]]:
            raise Unlike("the traces have other phases")
        for one, other in zip(small.spans[step], large.spans[step], strict=True):
            spans.append((step, one, other))
    return spans


def _storage_sections(small: Trace, large: Trace, spans: Spans) -> list[TraceSection]:
    """Return the sections of all storages, in the order in which they are created."""
    kinds: dict[tuple[int, Label], int] = {}  # numbers are faster to compare

    def created(trace: Trace, span: TensorLifetime) -> list[int]:
        found = []
        for event in span.events:
            if event >= 0:
                kind = trace.sizes_bytes[event], trace.labels[event]
                found.append(kinds.setdefault(kind, len(kinds)))
        return found

    sections: list[TraceSection] = []
    for _, one, other in spans:
        sections += align(created(small, one), created(large, other))
    return sections


def _written_events(small: _Events, large: _Events, storages: _Layout, more: int) -> array[int]:
    """Return the events of a span with `more` additional layers, and storages in this layout."""
    sections = align(small.places, large.places)
    in_small, in_large, in_result = (_Layout(sections, layers) for layers in (0, 1, more))
    events = array("q", bytes(8 * in_result.length))
    for indices, larger_indices, target in zip(
        in_small.indices, in_large.indices, in_result.indices, strict=True
    ):
        law = _law(
            [small.repetitions[index] for index in indices],
            [large.repetitions[index] for index in larger_indices],
        )
        place = small.places[indices[0]]
        created = storages.indices[max(place, ~place)]
        first, last = law.at(0, more), law.at(len(target) - 1, more)
        if not (0 <= first < len(created) and 0 <= last < len(created)):
            raise Unlike("a law leads out of the layers")
        storage, step = created[first], law.slope * created.step
        if place < 0:
            storage, step = ~storage, -step
        events[_slice(target)] = _progression(storage, step, len(target))
    return events


def _progression(first: int, step: int, count: int) -> array[int]:
    """Return `count` numbers, each larger than the one before by the step."""
    if step == 0:
        return array("q", [first]) * count
    return array("q", range(first, first + step * count, step))


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


class _Law(NamedTuple):
    """The repetition of the storage of an event: `first + slope * number + shift * more`."""

    first: int
    slope: int
    shift: int

    def at(self, number: int, more: int) -> int:
        """Return the repetition in the n-th repetition of the event."""
        return self.first + self.slope * number + self.shift * more


def _law(small: Sequence[int], large: Sequence[int]) -> _Law:
    """Return the law of an event, from the repetitions of its storages in the two traces."""
    slope = large[1] - large[0] if len(large) > 1 else 0
    law = _Law(small[0], slope, large[0] - small[0])
    for more, found in enumerate((small, large)):
        if any(law.at(number, more) != repetition for number, repetition in enumerate(found)):
            raise Unlike("the layers do not create or release their storages in turn")
    return law


def _written_samples(small: Sequence[Sample], large: Sequence[Sample], more: int) -> list[Sample]:
    """Return the samples with `more` additional layers: each adds what the first one added."""
    if [replace(one, value=None) for one in small] != [replace(one, value=None) for one in large]:
        raise Unlike("other values are known of the traces")
    samples = []
    for one, other in zip(small, large, strict=True):
        if one.value is None or other.value is None:
            raise Unlike("a value is not known")
        samples.append(replace(one, value=one.value + (other.value - one.value) * more))
    return samples
