"""Settings of a simulated run, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from rankscope.tracer.topology import Layout

from ..errors import ScenarioError
from ..faults.spec import Fault, FaultCause
from .schedule import V_CHUNKS, Schedule

MAX_WORLD_SIZE = 1 << 20
AT_LEAST_ONE = (
    "dp", "pp", "tp", "cp", "ep", "vpp", "num_steps", "num_microbatches", "num_buckets",
    "ranks_per_host", "hosts_per_rack", "tokens_per_microbatch",
)  # fmt: skip


class TpDetail(StrEnum):
    """Recording of the communication inside compute spans."""

    COLLAPSED = "collapsed"
    """None: partners wait for each other inside the span, and the trace cannot distinguish them."""

    COARSE = "coarse"
    """One collective at the end of each forward and backward."""

    FULL = "full"
    """Two all-reduces a layer."""

    SEQUENCE = "sequence"
    """An all-gather and a reduce-scatter in place of each all-reduce (sequence parallelism)."""


class RankOrder(StrEnum):
    """Axis that changes fastest with the rank."""

    TP_FIRST = "tp-first"
    DP_FIRST = "dp-first"
    """Data-parallel neighbours share a host, tensor-parallel partners do not."""


class Sends(StrEnum):
    """Modes of sending."""

    BACKGROUND = "background"
    """The stage continues; the message waits for its receiver."""

    BLOCKING = "blocking"
    """The stage waits; in the steady state one call sends and receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Random differences between healthy ranks, items and messages."""

    rank_bias_ratio: float = 0.005
    """Standard deviation of the constant speed of a rank; at most 3 of it."""

    compute_jitter_ratio: float = 0.01
    """Standard deviation of one forward, backward or optimizer step."""

    transfer_jitter_ratio: float = 0.03
    """Standard deviation of the logarithm of one transfer."""

    end_jitter_ns: int = 2_000
    """Mean of the exponential delay with which a member leaves a collective."""

    launch_gap_ns: int = 20_000
    """Mean of the exponential gap before a compute span."""

    drift_ratio: float = 0.0
    """Amplitude of a slow change of all compute, such as by temperature."""

    drift_period_steps: int = 1_000
    sequence_spread: float = 0.0
    """Standard deviation of the logarithm of a micro-batch's compute: sequence lengths vary."""

    token_spread: float = 0.0
    """Standard deviation of the logarithm of a step's tokens, equal on all ranks: the batch varies,
    and compute with it."""

    token_period_steps: int = 1
    """Steps for which the tokens stay the same."""

    expert_spread: float = 0.0
    """Standard deviation of the logarithm of an expert-parallel rank's tokens per micro-batch and
    chunk: the router sends unequal numbers of tokens."""

    clock_error_ns: int = 20_000
    """Largest difference of two hosts' clocks; each stays within half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Latency and bandwidth of each class of link.

    A transfer takes ``latency + bytes / bandwidth``. The defaults are
    typical of a cluster with NVLink and one 400 Gbit/s adapter per device.
    """

    host_bytes_per_s: float = 300e9
    """Between two devices of one host."""

    rack_bytes_per_s: float = 45e9
    """Between hosts of one rack."""

    spine_bytes_per_s: float = 40e9
    """Between racks."""

    host_latency_ns: int = 3_000
    rack_latency_ns: int = 8_000
    spine_latency_ns: int = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run."""

    dp: int = 2
    pp: int = 2
    tp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert-parallel partners, neighbours on the dp axis; above 1 every layer has experts."""

    vpp: int = 1
    """Model chunks per stage; above 1 the schedule is interleaved."""

    schedule: Schedule = Schedule.ONE_F_ONE_B

    num_steps: int = 20
    num_microbatches: int = 8
    num_layers: int | None = None
    """Layers of all stages; None for 4 per stage."""

    tp_detail: TpDetail = TpDetail.COLLAPSED
    sends: Sends = Sends.BACKGROUND
    overlap: bool = False
    """Whether gradients are reduced while the backward of the last micro-batch runs."""

    prefetch: bool = False
    """Whether parameters are gathered in buckets during the first forwards of a step (FSDP, ZeRO),
    instead of at the end of the previous step."""

    num_buckets: int = 4
    """Buckets in which overlapped gradients of a chunk are reduced, or its parameters gathered."""

    ranks_per_host: int = 8
    hosts_per_rack: int = 4
    rank_order: RankOrder = RankOrder.TP_FIRST

    forward_ms: float = 10.0
    """Forward of one micro-batch on one stage with all its chunks, without communication."""

    backward_ms: float = 20.0
    weight_ratio: float = 0.5
    """Share of the weights' gradients in the backward, if the schedule splits it."""

    expert_ratio: float = 0.5
    """Share of the experts in forward and backward, if ``ep`` is above 1."""

    expert_weights: tuple[float, ...] = ()
    """Constant weight of each expert-parallel position in the tokens, relative to 1.0; empty if
    equal."""

    optimizer_ms: float = 5.0
    data_ms: float = 0.5
    """Reading the data of a step; 0 leaves the span out."""

    stage_weights: tuple[float, ...] = ()
    """Weight of each stage in the compute, relative to 1.0; empty if equal."""

    activation_bytes: int = 8 << 20
    """Activation of one micro-batch between two stages, per rank."""

    tp_bytes: int = 16 << 20
    """Size of one tensor-parallel collective."""

    ep_bytes: int = 16 << 20
    """Size of one all-to-all that brings tokens to experts or back, per rank."""

    gradient_bytes: int = 1 << 30
    """Gradients of one rank's part of the model."""

    tokens_per_microbatch: int = 8_192
    record_lengths: bool = True
    """Whether tokens and squared lengths of each micro-batch are recorded."""

    record_samples: bool = True
    """Whether clock and power of each device are sampled, once per step."""

    noise: Noise = field(default_factory=Noise)
    network: Network = field(default_factory=Network)
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    started_ns: int = 1_767_225_600_000_000_000
    """Unix time of the first step."""

    def __post_init__(self) -> None:
        self._check_layout()
        self._check_numbers()
        self._check_parts()
        for fault in self.faults:
            self._check_fault(fault)

    @property
    def layout(self) -> Layout:
        """Sizes of the parallel axes."""
        return Layout(dp=self.dp, pp=self.pp, tp=self.tp, cp=self.cp, ep=self.ep, vpp=self.vpp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def num_hosts(self) -> int:
        """Number of hosts; the last may have fewer ranks."""
        return -(-self.world_size // self.ranks_per_host)

    @property
    def num_racks(self) -> int:
        """Number of racks; the last may have fewer hosts."""
        return -(-self.num_hosts // self.hosts_per_rack)

    @property
    def layers_per_chunk(self) -> int:
        """Layers of one model chunk, at least one."""
        layers = 4 * self.pp if self.num_layers is None else self.num_layers
        return max(1, layers // (self.pp * self.vpp))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, as in the manifest.

        The faults are left out: the diagnosis, which should find them, reads the manifest.
        """
        plain = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "faults"
        }
        return plain | {"noise": asdict(self.noise), "network": asdict(self.network)}

    def _check_layout(self) -> None:
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ScenarioError(f"Scenario.{name} must be at least 1: {getattr(self, name)}")
        if self.world_size > MAX_WORLD_SIZE:
            raise ScenarioError(
                f"Scenario has {self.world_size} ranks, at most {MAX_WORLD_SIZE}: make dp smaller"
            )
        if self.dp % self.ep:
            raise ScenarioError(f"Scenario.ep {self.ep} must divide dp {self.dp}")
        if self.ep > 1 and self.tp * self.cp > 1 and self.tp_detail is TpDetail.COLLAPSED:
            raise ScenarioError(
                f"Scenario.tp_detail must not be {self.tp_detail} with ep {self.ep} and tp x cp"
                f" {self.tp * self.cp}: a trace that has the experts' all-to-all also has the other"
                " collectives; use coarse"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        is_v = self.schedule is Schedule.ZERO_BUBBLE_V
        if is_v and (self.vpp != V_CHUNKS or self.pp == 1):
            raise ScenarioError(
                f"Scenario.vpp must be {V_CHUNKS}, and pp at least 2, for {self.schedule}:"
                f" vpp {self.vpp}, pp {self.pp}"
            )
        if self.vpp > 1 and not is_v and (self.num_microbatches % self.pp or self.pp == 1):
            raise ScenarioError(
                f"Scenario.num_microbatches {self.num_microbatches} must be a multiple of"
                f" pp {self.pp}, and pp at least 2, for an interleaved schedule (vpp {self.vpp})"
            )
        splits = self.schedule is not Schedule.ONE_F_ONE_B
        if (self.vpp > 1 or splits) and self.sends is Sends.BLOCKING:
            raise ScenarioError(
                "Scenario.sends must be background for an interleaved or zero-bubble schedule"
                f" (vpp {self.vpp}, {self.schedule})"
            )
        least = self.pp * self.vpp
        if self.num_layers is not None and (self.num_layers < least or self.num_layers % least):
            raise ScenarioError(
                f"Scenario.num_layers {self.num_layers} must be a multiple of pp x vpp = {least}"
            )

    def _check_numbers(self) -> None:
        for name in ("forward_ms", "backward_ms", "optimizer_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ScenarioError(f"Scenario.{name} must be above 0: {getattr(self, name)}")
        for name in ("weight_ratio", "expert_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ScenarioError(
                    f"Scenario.{name} must be between 0 and 1: {getattr(self, name)}"
                )
        for name in ("data_ms", "activation_bytes", "tp_bytes", "ep_bytes", "gradient_bytes",
                     "seed"):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ScenarioError(f"Scenario.{name} must not be negative: {getattr(self, name)}")
        for name, size, place in (
            ("stage_weights", self.pp, "stage"),
            ("expert_weights", self.ep, "expert-parallel position"),
        ):
            weights = getattr(self, name)
            are_good = all(0 < weight < math.inf for weight in weights)
            if weights and (len(weights) != size or not are_good):
                raise ScenarioError(
                    f"Scenario.{name} must be {size} numbers above 0, one per {place}: {weights}"
                )

    def _check_parts(self) -> None:
        for name, value in asdict(self.noise).items():
            if not 0 <= value < math.inf:
                raise ScenarioError(f"Scenario.noise.{name} must not be negative: {value}")
        for name in ("rank_bias_ratio", "compute_jitter_ratio", "drift_ratio"):
            if getattr(self.noise, name) > MAX_JITTER_RATIO:
                raise ScenarioError(
                    f"Scenario.noise.{name} must be at most {MAX_JITTER_RATIO}:"
                    f" {getattr(self.noise, name)}"
                )
        if self.noise.token_period_steps < 1:
            raise ScenarioError(
                f"Scenario.noise.token_period_steps must be at least 1:"
                f" {self.noise.token_period_steps}"
            )
        for name, value in asdict(self.network).items():
            if not 0 < value < math.inf and not name.endswith("latency_ns"):
                raise ScenarioError(f"Scenario.network.{name} must be above 0: {value}")

    def _check_fault(self, fault: Fault) -> None:
        places = [
            *(("rank", rank, self.world_size) for rank in fault.ranks),
            ("src", fault.src, self.world_size),
            ("dst", fault.dst, self.world_size),
            ("host", fault.host, self.num_hosts),
            ("rack", fault.rack, self.num_racks),
            ("stage", fault.stage, self.pp),
            ("tp", fault.tp, self.tp),
        ]
        for name, value, size in places:
            if value is not None and value >= size:
                raise ScenarioError(
                    f"fault {str(fault)!r}: {name} {value} does not exist: the scenario has"
                    f" {name} 0 to {size - 1}"
                )
        if fault.first_step >= self.num_steps:
            raise ScenarioError(
                f"fault {str(fault)!r} begins after the last step {self.num_steps - 1}:"
                " give earlier steps, or more --steps"
            )
        if fault.cause is FaultCause.LAUNCH_SKEW and self.dp * self.cp == 1:
            raise ScenarioError(f"fault {str(fault)!r} needs dp or cp above 1")


MAX_JITTER_RATIO = 0.2
"""Larger normal noise could make a duration negative."""
