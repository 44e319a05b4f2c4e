#!/usr/bin/env python3
"""The bandwidth that each policy needs between host and device, computed, not measured.

For one transformer layer of width h with a heads, on b sequences of s tokens in 16 bits:

- It saves s*b*h * (34 + 5*a*s/h) bytes for backward; without the second term if attention is fused, keeping no scores.
  (V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 1.)
  Of these the results of matrix products are 18*s*b*h (query, key and value 6, projection 2, feed-forward 8 and 2),
  plus, if attention isn't fused, 2*a*s*s*b for the scores and 2*s*b*h for what they weigh.
- Its forward takes 24*b*s*h*h + 4*b*s*s*h floating-point operations, its backward twice as many.
  (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.)

What a layer sends in forward can hide under the forward of the next one, what it loads under the backward of the one
after it. With bytes V, time of computation T and bandwidth B a copy adds max(0, V/B - T) to the step, per layer and
direction. A replay makes backward longer by one forward: more time to hide under. Of the selective policy, what is
replayed (all but matrix products) is taken to cost nothing.

The bandwidth of a rank is that of its link, or its part of the host's memory bandwidth if that is less: the ranks of
one host copy at the same time. A copy moves each byte through host memory once; nothing else is counted there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Layer:
    """One transformer layer, in 16 bits."""

    width: int
    heads: int
    tokens: int
    batch: int
    fused_attention: bool

    @property
    def unit(self) -> int:
        return self.tokens * self.batch * self.width

    @property
    def saved_bytes(self) -> int:
        return 34 * self.unit + (0 if self.fused_attention else 5 * self.heads * self.tokens**2 * self.batch)

    @property
    def input_bytes(self) -> int:
        return 2 * self.unit

    @property
    def product_bytes(self) -> int:
        scores = 0 if self.fused_attention else 2 * self.heads * self.tokens**2 * self.batch + 2 * self.unit
        return 18 * self.unit + scores

    @property
    def forward_flop(self) -> int:
        return 24 * self.unit * self.width + 4 * self.unit * self.tokens


@dataclass(frozen=True)
class Machine:
    """A host with its devices."""

    tflops: float
    """Of one device, for dense 16-bit matrix products."""
    utilisation: float
    """The part of it that training reaches."""
    ranks: int
    link_gbps: float
    """Of one device, per direction, in 10**9 bytes per second."""
    host_gbps: float
    """Of the host's memory, for all ranks together."""

    @property
    def rank_gbps(self) -> float:
        return min(self.link_gbps, self.host_gbps / self.ranks)

    def seconds(self, flop: float) -> float:
        return flop / (self.tflops * 1e12 * self.utilisation)


@dataclass(frozen=True)
class Need:
    """What one policy needs, per layer unless it says otherwise."""

    policy: str
    bytes_per_layer: int
    """In each direction."""
    bytes_per_step: int
    """Of all layers, both directions."""
    forward_ms: float
    backward_ms: float
    to_host_gbps: float
    """So that a copy to host takes no longer than a forward."""
    to_device_gbps: float
    host_gbps: float
    """The larger of the two, of all ranks."""
    added: float
    """What the copies add to a step, as a part of plain's."""


def needs(layer: Layer, layers: int, machine: Machine) -> list[Need]:
    """A row for each policy."""
    forward = machine.seconds(layer.forward_flop)
    plain = 3 * forward
    found = []
    for policy, nbytes, replayed in (
        ("recompute", 0, 1.0),
        ("recompute + swapped inputs", layer.input_bytes, 1.0),
        ("selective, matrix products swapped", layer.product_bytes, 0.0),
        ("swap", layer.saved_bytes, 0.0),
    ):
        backward = (2 + replayed) * forward
        copy = nbytes / (machine.rank_gbps * 1e9)
        late = max(0.0, copy - forward) + max(0.0, copy - backward)
        to_host, to_device = nbytes / forward / 1e9, nbytes / backward / 1e9
        found.append(
            Need(
                policy=policy,
                bytes_per_layer=nbytes,
                bytes_per_step=2 * nbytes * layers,
                forward_ms=forward * 1e3,
                backward_ms=backward * 1e3,
                to_host_gbps=to_host,
                to_device_gbps=to_device,
                host_gbps=max(to_host, to_device) * machine.ranks,
                added=late / plain,
            )
        )
    return found


def table(layer: Layer, layers: int, machine: Machine, found: list[Need]) -> Table:
    """What was computed, for people."""
    attention = "fused" if layer.fused_attention else "unfused"
    built = Table(
        title=f"computed: {layers} layers of width {layer.width}, {layer.heads} heads, {layer.batch} x {layer.tokens} "
        f"tokens, 16 bits, {attention} attention",
        caption=f"{machine.tflops:g} TFLOPS x {machine.utilisation:g}; {machine.ranks} ranks on a host; each has "
        f"{machine.rank_gbps:.1f} GB/s per direction (its link {machine.link_gbps:g}, its part of the host's memory "
        f"{machine.host_gbps / machine.ranks:.1f})\nadded: by the copies, to plain's step, where they don't hide; a "
        f"replay's own time (a third of a step) isn't in it",
        caption_justify="left",
    )
    built.add_column("policy")
    for heading in (
        "MB/layer",
        "GB/step",
        "forward ms",
        "backward ms",
        "to host GB/s",
        "back GB/s",
        "host GB/s",
        "added",
    ):
        built.add_column(heading, justify="right")
    for row in found:
        built.add_row(
            row.policy,
            f"{row.bytes_per_layer / 1e6:.0f}",
            f"{row.bytes_per_step / 1e9:.1f}",
            f"{row.forward_ms:.2f}",
            f"{row.backward_ms:.2f}",
            f"{row.to_host_gbps:.1f}",
            f"{row.to_device_gbps:.1f}",
            f"{row.host_gbps:.0f}",
            f"{row.added:.0%}",
        )
    return built


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--unfused-attention", action="store_true")
    parser.add_argument("--tflops", type=float, default=300, help="of a device, dense, 16 bits")
    parser.add_argument("--utilisation", type=float, default=0.4, help="the part of it that training reaches")
    parser.add_argument("--ranks", type=int, default=8, help="devices that share the host")
    parser.add_argument("--link-gbps", type=float, default=25, help="of a device's link, per direction")
    parser.add_argument("--host-gbps", type=float, default=150, help="of the host's memory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    a = parser.parse_args(arguments)
    for name in (
        "width",
        "heads",
        "tokens",
        "batch",
        "layers",
        "tflops",
        "utilisation",
        "ranks",
        "link_gbps",
        "host_gbps",
    ):
        if getattr(a, name) <= 0:
            sys.exit(f"--{name.replace('_', '-')} must be positive, but is {getattr(a, name):g}")
    layer = Layer(a.width, a.heads, a.tokens, a.batch, not a.unfused_attention)
    machine = Machine(a.tflops, a.utilisation, a.ranks, a.link_gbps, a.host_gbps)
    found = needs(layer, a.layers, machine)
    if a.json:
        about = {"computed": True, "layer": asdict(layer), "layers": a.layers, "machine": asdict(machine)}
        print(json.dumps({**about, "policies": [asdict(row) for row in found]}, indent=1))
        return
    Console(width=140).print(table(layer, a.layers, machine, found))


if __name__ == "__main__":
    main()
