"""What a window costs on a network, as docs/network.md states it: pure functions of what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pyengine.gradients.buckets import FIRST_BUCKET_BYTES
from pyengine.ops.codec import Codec
from pyengine.wire import FP32, ErrorFeedback, Wire
from pyengine.wire.exchange import HasEncoding, exchanges_parts

T = TypeVar("T")
HEADERS = 1.05  # bytes on a link a byte sent: TCP, IP and Ethernet, in packets of 1500
LOSSES = ("lossless", "lossy, fed back", "lossy")  # what wires do to the sum; the least first
_EXACTLY = 1e-9  # below this a share is only a rounding above the one that is asked for
_CAST = {torch.bfloat16: Codec("bf16"), torch.float16: Codec("fp16")}
_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Transport:
    """How fast a rank sends where no link holds it up.

    Attributes:
        bytes_s: sent a second.
        cpu_s_per_byte: processor time a byte sent, of all threads.
    """

    bytes_s: float
    cpu_s_per_byte: float


@dataclass(frozen=True)
class Speeds:
    """How fast one rank is.

    Attributes:
        latency_s: of one step of a collective.
        transports: by kind: "all_reduce fp32", "all_reduce bf16", "all_reduce fp16", "exchange".
        kernels: bytes read and written a second by "encode int8", "encode_residual int8", "sum int8",
            "decode int8" and the same of other formats.
    """

    latency_s: float
    transports: Mapping[str, Transport]
    kernels: Mapping[str, float]


@dataclass(frozen=True)
class Cluster:
    """Hosts alike.

    Attributes:
        hosts: how many.
        ranks_per_host: which share its link.
        link_bytes_s: what a host can send a second; inf where nothing holds it up.
        cores_per_rank: of the host's processor.
    """

    hosts: int
    ranks_per_host: int
    link_bytes_s: float
    cores_per_rank: float

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def slowdown(self) -> float:
        """How many times longer processor time takes where ranks share cores."""
        return max(1.0, 1 / self.cores_per_rank)

    @property
    def has_spare_core(self) -> bool:
        """Whether a rank has a core for its transport beside the one that computes."""
        return self.cores_per_rank >= 2


@dataclass(frozen=True)
class Work:
    """What a rank computes.

    Attributes:
        numel: gradient elements.
        forward_s, backward_s: of a micro-batch.
        step_s: of the optimizer, with unscale and clip.
        bucket_bytes: of float32 gradients that travel together; the engine's first bucket is smaller.
    """

    numel: int
    forward_s: float
    backward_s: float
    step_s: float
    bucket_bytes: float

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """How many elements a bucket has and how many buckets have as many, in the order in which a backward
        fills them.
        """
        cap = max(1, int(self.bucket_bytes // 4))
        first = min(self.numel, cap, FIRST_BUCKET_BYTES // 4)
        whole, rest = divmod(self.numel - first, cap)
        return [(size, count) for size, count in ((first, 1), (cap, whole), (rest, 1)) if size and count]

    @property
    def num_buckets(self) -> int:
        return sum(count for _, count in self.buckets)

    @property
    def micro_batch_s(self) -> float:
        return self.forward_s + self.backward_s

    def window_s(self, accumulate: int, exposed_s: float) -> float:
        """Return the time of a window: A (forward + backward) + exposed + step."""
        return accumulate * self.micro_batch_s + exposed_s + self.step_s

    def least_accumulate(self, exposed_s: float, share: float) -> int:
        """Return the fewest micro-batches with which the exposed sync is at most a share of the window."""
        rest = exposed_s / share - exposed_s - self.step_s  # what the micro-batches have to last
        return max(1, math.ceil(rest / self.micro_batch_s - _EXACTLY))


@dataclass(frozen=True)
class Sync:
    """What one window's gradients cost over a wire, in seconds of the slowest rank.

    Attributes:
        bytes_sent: by one rank.
        latency_s: of all steps of all collectives.
        link_s: sending on the link alone.
        transport_s: sending where the link holds nothing up.
        kernels_s: encoding, adding up, decoding.
        processor_s: what the backward cannot hide, as it needs the core that the backward runs on.
        total_s: beginning to end, were there nothing else.
        exposed_s: what the window is longer for it.
    """

    bytes_sent: int
    latency_s: float
    link_s: float
    transport_s: float
    kernels_s: float
    processor_s: float
    total_s: float
    exposed_s: float

    @property
    def limit(self) -> str:
        """What takes longest: "link", "transport", "latency" or "kernels"; "none" if nothing travels."""
        if not self.bytes_sent:
            return "none"
        parts = {"link": self.link_s, "transport": self.transport_s}
        parts |= {"latency": self.latency_s, "kernels": self.kernels_s}
        return max(parts, key=lambda name: parts[name])


def sync(wire: Wire, work: Work, cluster: Cluster, speeds: Speeds) -> Sync:
    """Return what the gradients of a window cost over a wire.

    Raises:
        ValueError: nothing is known of the wire's kernels or transport.
    """
    world_size, buckets = cluster.world_size, work.buckets
    if world_size == 1:
        return Sync(0, 0, 0, 0, 0, 0, 0, 0)
    transport = _known(speeds.transports, transport_kind(wire))
    bytes_sent = sum(count * wire.bytes_on_wire(numel, world_size) for numel, count in buckets)
    num_steps = work.num_buckets * steps(wire, world_size) + 2 * (world_size - 1)  # and a header
    latency_s = speeds.latency_s * num_steps
    on_link = sum(count * link_bytes(wire, numel, cluster) for numel, count in buckets)
    link_s = HEADERS * on_link / cluster.link_bytes_s
    transport_s = cluster.slowdown * bytes_sent / transport.bytes_s
    passes = kernel_bytes(wire, work.numel, world_size)
    kernels_s = cluster.slowdown * sum(n / _known(speeds.kernels, name) for name, n in passes.items())
    sending_s = 0 if cluster.has_spare_core else cluster.slowdown * bytes_sent * transport.cpu_s_per_byte
    flowing_s = max(link_s, transport_s) + kernels_s
    durations_s = [latency_s / work.num_buckets + flowing_s * numel / work.numel for numel, _ in buckets]
    exposed_s = exposed(durations_s, kernels_s + sending_s, work)
    return Sync(
        bytes_sent,
        latency_s,
        link_s,
        transport_s,
        kernels_s,
        kernels_s + sending_s,
        latency_s + flowing_s,
        exposed_s,
    )


def exposed(durations_s: Sequence[float], processor_s: float, work: Work) -> float:
    """Return what of a sync the last backward cannot hide.

    A bucket is there when the backward has come to its last gradient, and is sent behind the one before. Work
    of the core on which the backward runs is hidden by nothing.

    Args:
        durations_s: of a bucket of each size in `work.buckets`, from its first byte to its last value.
        processor_s: what the backward's own core has to do for the sync.
    """
    filled_s = sent_s = 0.0
    for (numel, count), duration_s in zip(work.buckets, durations_s, strict=True):
        fill_s = work.backward_s * numel / work.numel
        # Of alike buckets either the first one is what all wait behind, or the last one.
        sent_s = max(
            max(sent_s, filled_s + fill_s) + count * duration_s, filled_s + count * fill_s + duration_s
        )
        filled_s += count * fill_s
    return max(sent_s - filled_s, processor_s)


def steps(wire: Wire, world_size: int) -> int:
    """Return the steps of a bucket's collectives, each of which waits for the one before.

    A ring all-reduce has 2 (W - 1). Of two exchanges the first has one, as all send to all at once, and the
    second, which sends round, W - 1.
    """
    return world_size if exchanges_parts(wire) else 2 * (world_size - 1)


def link_bytes(wire: Wire, numel: int, cluster: Cluster) -> float:
    """Return the bytes of a bucket that a host sends on its link.

    A ring leaves a host once, however many ranks it has. In an exchange of all with all every rank of a host
    sends to every rank elsewhere.
    """
    if cluster.hosts == 1:
        return 0
    world_size, ranks = cluster.world_size, cluster.ranks_per_host
    bytes_sent = wire.bytes_on_wire(numel, world_size)
    if not exchanges_parts(wire):
        return bytes_sent
    all_to_all = bytes_sent / 2 * ranks * (world_size - ranks) / (world_size - 1)
    return all_to_all + bytes_sent / 2


def kernel_bytes(wire: Wire, numel: int, world_size: int) -> dict[str, float]:
    """Return the bytes that every kernel reads and writes on one rank for so many elements, by its name."""
    codec = _codec(wire)
    if codec is None:
        return {}
    form, code = codec.format, codec.num_bytes(numel)
    residual = 8 * numel if isinstance(wire, ErrorFeedback) else 0
    encode = "encode_residual" if residual else "encode"
    found: dict[str, float] = {
        f"{encode} {form}": 4 * numel + code + residual,
        f"decode {form}": code + 4 * numel,
    }
    if exchanges_parts(wire):
        found[f"sum {form}"] = code + (code + residual) / world_size
    return found


def transport_kind(wire: Wire) -> str:
    """Return which of `Speeds.transports` carries a wire."""
    return "exchange" if exchanges_parts(wire) else f"all_reduce {_OF_DTYPE[wire.dtype]}"


def loss_of(wire: Wire) -> str:
    """Return which of `LOSSES` a wire has."""
    lossless, fed_back, lossy = LOSSES
    if isinstance(wire, FP32):
        return lossless
    return fed_back if isinstance(wire, ErrorFeedback) else lossy


def _codec(wire: Wire) -> Codec | None:
    """Return what writes a wire's values; None for the sum's own type."""
    inner = wire.wire if isinstance(wire, ErrorFeedback) else wire
    encoding = inner.encoding if isinstance(inner, HasEncoding) else None
    return _CAST.get(inner.dtype) if encoding is None else encoding.codec


def _known(known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise ValueError(f"nothing is known of {name!r}, but of {', '.join(known)}: measure it again")
    return known[name]
