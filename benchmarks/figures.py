"""Figures of a benchmark report: the roofline, the ratios of other libraries' times, and the cost of a series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sightline.view import plotting
from sightline.view.palette import LIGHT, SERIES

from .report import Entry, Finding, Report, Row, format_amount, format_duration

BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER, OLIVE, GREY, PALE = SERIES
PEER_STYLES = {  # (colour, marker) of each contender
    "sightline": (BLUE, "o"),
    "torch": (ORANGE, "s"),
    "flex": (PURPLE, "D"),
    "onnxruntime": (GREEN, "^"),
    "openvino": (AMBER, "v"),
    "jax": (SKY, "P"),
    "zentorch": (OLIVE, "*"),
    "vllm": (PALE, "h"),
    "mha": (GREY, "X"),
    "flash": (ORANGE, "s"),
    "cudnn": (GREEN, "^"),
    "efficient": (AMBER, "v"),
}
MIN_AXIS_RATIO = 30.0  # least ratio of the largest number to the smallest number on a logarithmic axis
CEILINGS = {"bfloat16": "bfloat16 dot", "float32": "float32 FMA", "matmul": "bfloat16 matmul"}
BANDWIDTHS = {"read": "read", "copy": "copied"}  # name of a measured peak bandwidth: its label in the figure
ROOFLINE_PEERS = ("torch", "cudnn")  # the peers that the roofline draws; a line joins a peer's dot and Sightline's


def draw(report: Report, folder: Path) -> list[Path]:
    """Write every figure for which the report has findings, and return the paths of the files."""
    figures: dict[str, Any] = {}
    if any(finding.rows[0].peaks for finding in _compared_findings(report)):
        figures["roofline"] = roofline(report)
    if _compared_findings(report):
        figures["ratios"] = ratios(report)
    for finding in report.findings:
        if finding.axis and len(finding.rows) > 1:
            figures[finding.name.replace(" ", "-")] = cost(finding)
    folder.mkdir(parents=True, exist_ok=True)
    return [plotting.save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _compared_findings(report: Report) -> list[Finding]:
    """Return the report's findings that have times of Sightline and of at least one other contender in PEER_STYLES."""
    timed = [f for f in report.findings if f.entry("sightline")]
    return [f for f in timed if any(entry.name in PEER_STYLES and entry.seconds for entry in f.entries[1:])]


# -- the roofline --------------------------------------------------------------------------------------------------


def roofline(report: Report) -> Any:
    """Return a figure: left FLOP/s against FLOPs per byte below measured limits, right shares of a peak.

    Source: Williams, Waterman and Patterson, "Roofline", 2009.
    """
    findings = [finding for finding in _compared_findings(report) if finding.rows[0].peaks]
    figure = plotting.new_figure(11.5, max(4.6, 1.6 + 0.27 * len(findings)))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_ceilings(left, report, findings)
    for number, finding in enumerate(findings, 1):
        x = finding.flops / finding.bytes_moved
        rates = {entry.name: finding.flops / entry.median for entry in finding.entries if entry.seconds}
        for name in rates.keys() & ROOFLINE_PEERS:
            colour, marker = PEER_STYLES[name]
            left.plot([x, x], [rates[name], rates["sightline"]], color=LIGHT.line, linewidth=1, zorder=1)
            left.plot(x, rates[name], marker, color=colour, markersize=4, zorder=2, alpha=0.8)
        left.plot(x, rates["sightline"], "o", color=BLUE, markersize=6.5, zorder=3, alpha=0.9)
        angle = 2.4 * number  # the numbers of neighbouring dots lie in different directions
        shift = {"xytext": (11 * np.cos(angle), 11 * np.sin(angle)), "textcoords": "offset points"}
        left.annotate(str(number), (x, rates["sightline"]), ha="center", va="center", **shift, **NUMBER_STYLE)
    left.set_title("FLOP/s against FLOPs per byte of inputs and outputs", loc="left", fontsize=9)
    _draw_shares(right, findings)
    figure.suptitle(f"Exact attention and the machine's measured peaks, {report.device}", fontsize=11)
    return figure


def _draw_ceilings(axis: Any, report: Report, findings: Sequence[Finding]) -> None:
    peaks = report.peaks
    bandwidth = next((name for name in BANDWIDTHS if name in peaks), None)
    read = peaks[bandwidth] if bandwidth else None
    intensities = [finding.flops / finding.bytes_moved for finding in findings]
    low, high = min(intensities) / 3, max(intensities) * 3
    for name, label in CEILINGS.items():
        if name in peaks:
            ridge = peaks[name] / read if read else low
            xs = [x for x in (low, ridge, high) if x >= low]
            axis.plot(
                xs, [min(peaks[name], x * (read or np.inf)) for x in xs], color=LIGHT.muted, linewidth=1.1, zorder=0
            )
            label = f"{label} {format_amount(peaks[name], 'FLOP/s')}"
            at = max(ridge, low) * 1.2, peaks[name]
            axis.annotate(label, at, xytext=(0, 4), textcoords="offset points", **LABEL_STYLE)
    if bandwidth and read:
        label = f"{BANDWIDTHS[bandwidth]} {format_amount(read, 'B/s')}"
        axis.annotate(label, (low * 1.6, low * read), **LABEL_STYLE)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOPs per byte", fontsize=9)
    axis.yaxis.set_major_formatter(lambda value, _: format_amount(value, "FLOP/s"))
    axis.tick_params(labelsize=8)
    axis.grid(color=LIGHT.line, linewidth=0.6)
    plotting.hide_upper_spines(axis)


NUMBER_STYLE: dict[str, Any] = {"fontsize": 7, "color": BLUE, "zorder": 5}
LABEL_STYLE: dict[str, Any] = {"fontsize": 8, "color": LIGHT.muted}


def _draw_shares(axis: Any, findings: Sequence[Finding]) -> None:
    for row, finding in enumerate(findings):
        for entry in finding.entries:
            share = finding.share(entry)
            if entry.name in PEER_STYLES and share:
                _draw_dot(axis, share, row, entry, "sightline")
        limits = [v.target.limit for v in finding.verdicts if v.target.measure == "share"]
        if limits:
            axis.plot([limits[0]] * 2, [row - 0.36, row + 0.36], color="black", linewidth=1.4, zorder=4)
    axis.set_xlim(0, 1.05)
    axis.set_title("share of the peak; bars are targets", loc="left", fontsize=9)
    _label_rows(axis, [f"{finding.name}  {number}" for number, finding in enumerate(findings, 1)])
    _add_legend(axis.figure, {entry.name: entry for finding in findings for entry in finding.entries if entry.seconds})


# -- ratios --------------------------------------------------------------------------------------------------------


def ratios(report: Report) -> Any:
    """Return a figure of peers' times divided by Sightline's, by problem. A bar in a peer's colour is a target."""
    findings = _compared_findings(report)
    figure = plotting.new_figure(8.6, 1.5 + 0.3 * max(len(findings), 3))
    axis = figure.subplots()
    axis.axvline(1, color=BLUE, linewidth=1.2, zorder=1)
    values = [1.0]
    for row, finding in enumerate(findings):
        ours = finding.entry("sightline")
        assert ours is not None
        for entry in finding.entries[1:]:
            if entry.name in PEER_STYLES and entry.seconds:
                values.append(ours.speedup_over(entry))
                _draw_dot(axis, values[-1], row, entry)
        for verdict in finding.verdicts:
            if verdict.target.measure == "faster" and verdict.target.implementation in PEER_STYLES:
                colour = PEER_STYLES[verdict.target.implementation][0]
                values.append(verdict.target.limit)
                axis.plot([values[-1]] * 2, [row - 0.36, row + 0.36], color=colour, linewidth=2, zorder=2)
    axis.set_xscale("log")
    axis.set_xlim(min(values) / 1.3, max(values) * 1.3)
    _set_decade_ticks(axis.xaxis, lambda value: f"{value:g}×")
    axis.set_xlabel("time over Sightline's", fontsize=9)
    _label_rows(axis, [finding.name for finding in findings])
    _add_legend(figure, {entry.name: entry for finding in findings for entry in finding.entries[1:] if entry.seconds})
    figure.suptitle("Time of other libraries over Sightline's; bars are targets", fontsize=11)
    return figure


# -- cost ----------------------------------------------------------------------------------------------------------


def cost(finding: Finding) -> Any:
    """Return a figure of the time and the memory of a series against the coordinate of its points.

    The coordinate is n, and the time is per token; or it is the share of allowed pairs, and the time is per call.
    """
    figure = plotting.new_figure(9.2, 4.3)
    time, memory = figure.subplots(1, 2)
    names = {entry.name: entry for point in finding.rows for entry in point.entries if entry.seconds}
    by_length = finding.axis == "n"
    for name, entry in names.items():
        _draw_line(time, finding, name, entry, lambda e, p: e.median / (p.n if by_length else 1) if e.seconds else None)
        _draw_line(memory, finding, name, entry, lambda e, p: p.extra_bytes(e))
    _format_axes(time, finding, "time per token" if by_length else "time per call", format_duration, 10)
    _format_axes(memory, finding, "memory beyond inputs and outputs", lambda value: format_amount(value, "B"), 2)
    figure.suptitle(f"Cost by {'length' if by_length else 'allowed pairs'}: {finding.description}", fontsize=10)
    return figure


def _draw_line(axis: Any, finding: Finding, name: str, entry: Entry, of: Callable[[Entry, Row], float | None]) -> None:
    dots = [(p.coordinate, of(e, p)) for p in finding.rows for e in p.entries if e.name == name]
    shown = [(x, y) for x, y in dots if y is not None]
    if not shown:
        return
    colour, marker = PEER_STYLES.get(name, (LIGHT.muted, "o"))
    axis.plot(*zip(*shown, strict=True), marker + "-", color=colour, markersize=5, linewidth=1.4)
    x, y = shown[-1]
    axis.annotate(entry.label, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=colour, fontsize=9)


def _format_axes(axis: Any, finding: Finding, title: str, label: Callable[[float], str], base: int) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=base)
    low, high = axis.get_ylim()
    if high / low < MIN_AXIS_RATIO:  # on a shorter axis, small differences would look large
        middle = (low * high) ** 0.5
        axis.set_ylim(middle / MIN_AXIS_RATIO**0.5, middle * MIN_AXIS_RATIO**0.5)
    points = [point.coordinate for point in finding.rows if point.entries]
    axis.set_xlim(points[0] / 1.2, points[-1] * max(points[-1] / points[0], 4) ** 0.38)  # leaves space for labels
    named = [f"{at:,.0f}" if finding.axis == "n" else f"{at:.0%}" if at > 0.095 else f"{at:.1%}" for at in points]
    axis.set_xticks(points, named, rotation=30, ha="right")
    axis.minorticks_off()
    if base == 10:
        _set_decade_ticks(axis.yaxis, label)
    else:
        axis.yaxis.set_major_formatter(lambda value, _: label(value))
    axis.set_xlabel("tokens" if finding.axis == "n" else "pairs the mask allows", fontsize=9)
    axis.set_title(title, loc="left", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color=LIGHT.line, linewidth=0.7)
    plotting.hide_upper_spines(axis)


# -- parts of figures ----------------------------------------------------------------------------------------------


def _set_decade_ticks(axis: Any, label: Callable[[float], str]) -> None:
    """Set labelled ticks at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: label(value))


def _draw_dot(axis: Any, x: float, row: float, entry: Entry, first: str = "") -> None:
    colour, marker = PEER_STYLES[entry.name]
    size, order = (7, 3) if entry.name == first else (5, 2)
    face = "white" if entry.wrong else colour  # a dot is hollow if the results exceed the rounding-error budget
    axis.plot(x, row, marker, color=colour, markerfacecolor=face, markersize=size, zorder=order, alpha=0.9)


def _label_rows(axis: Any, names: Iterable[str]) -> None:
    names = list(names)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color=LIGHT.line, linewidth=0.6)
    plotting.hide_upper_spines(axis)
    axis.spines["left"].set_visible(False)


def _add_legend(figure: Any, entries: dict[str, Entry]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for name in (name for name in entries if name in PEER_STYLES):
        colour, marker = PEER_STYLES[name]
        style: dict[str, Any] = {"linestyle": "", "color": colour, "marker": marker, "markersize": 5}
        handles.append(Line2D([], [], label=entries[name].label, **style))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=8, frameon=False)
