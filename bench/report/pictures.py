"""Pictures of records: rates over length, heat maps, masks. Matplotlib without a display, or plain pixels."""

import base64
import io
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from bench import options
from bench.report import aggregate
from bench.report.aggregate import Entry
from bench.report.tables import cell, heading
from workload.suite import ALL_BUILDERS, mask_suite

matplotlib.use("agg")  # no display is needed, or looked for

INK = "#123456"  # stands for the page's text colour: replaced by currentColor in an inlined SVG
PALETTE = (  # of the kernels in the order of `options.ALL_KERNELS`, legible on white and on black
    "#999999", "#b58ad6", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee6677", "#4477aa", "#6a5acd", "#00a087",
    "#a0674b", "#f29fc0", "#7f9a1e", "#e07b39", "#d946ef", "#2dd4bf")
DRAWN_TOKENS = 96
DRAWN: dict[str, Any] = {  # parameters that show a pattern's shape on 96 tokens
    "documents": (34, 12, 26, 8, 16), "window": 12, "block": 8, "prefix_share": 0.3, "global_share": 0.08,
    "sparse_block": 8, "density": 0.3,
}
STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "grid.color": INK, "grid.alpha": 0.15, "axes.grid": True, "svg.hashsalt": "report",
    "figure.max_open_warning": 0,
}


def png_bytes(pixels: np.ndarray) -> bytes:
    """An RGBA picture, uint8 [height, width, 4], as a PNG file."""
    height, width, _ = pixels.shape
    raw = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def mask_picture(name: str, tokens: int = DRAWN_TOKENS) -> bytes:
    """A pattern on 96 tokens as a PNG: visible cells in blue, the rest transparent."""
    settings = DRAWN | ({} if tokens == DRAWN_TOKENS else {"documents": "auto"})
    seen = mask_suite(name, tokens, seed=3, **settings).dense()
    pixels = np.zeros((*seen.shape, 4), np.uint8)
    pixels[seen] = (0x44, 0x77, 0xAA, 0xFF)
    pixels[~seen] = (0x80, 0x80, 0x80, 0x20)
    return png_bytes(pixels)


def mask_pictures() -> dict[str, str]:
    """All fourteen patterns as data URLs."""
    return {name: data_url(mask_picture(name)) for name in ALL_BUILDERS}


def data_url(png: bytes) -> str:
    """A PNG inside an address, so that a page needs no second file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def kernel_colour(kernel: str) -> str:
    """Of a kernel, the same everywhere on the page."""
    known = options.ALL_KERNELS.index(kernel) if kernel in options.ALL_KERNELS else len(options.ALL_KERNELS)
    return PALETTE[known % len(PALETTE)]


def colour_of(column: str) -> tuple[str, str]:
    """Colour by kernel, line style by stack (JAX solid, PyTorch dashed)."""
    return kernel_colour(column.split()[0]), "-" if column.endswith(" jax") else "--"


def curves(found: Sequence[Entry]) -> dict[str, plt.Figure]:
    """Rate over length, one figure a pass and shape, one panel a mask that has several lengths."""
    figures = {}
    groups: dict[tuple, list[Entry]] = {}
    for entry in found:
        if entry.rate:
            groups.setdefault((entry.which, entry.shape, entry.dtype), []).append(entry)
    for (which, shape, dtype), group in groups.items():
        several = {m for m in ALL_BUILDERS if len({e.seq_len for e in group if e.mask == m}) > 1}
        group = [e for e in group if e.mask in several]
        if group:
            figures[f"{which}, {shape}, {dtype}"] = _curve_panels(group)
    return figures


def _curve_panels(group: Sequence[Entry]) -> plt.Figure:
    unit, name = aggregate.unit_of(group)
    masks = [m for m in ALL_BUILDERS if any(e.mask == m for e in group)]
    columns, lengths = aggregate.columns(group), sorted({e.seq_len for e in group})
    across = min(4, len(masks))
    down = -(-len(masks) // across)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(down, across, figsize=(3.1 * across, 2.3 * down + 0.7), squeeze=False,
                                    sharex=True, layout="constrained")
        for axis in axes.flat[len(masks):]:
            axis.set_visible(False)
        for axis, mask in zip(axes.flat, masks):
            for column in columns:
                line = sorted((e.seq_len, e.rate / unit) for e in group if (e.mask, e.column) == (mask, column))
                if line:
                    colour, style = colour_of(column)
                    axis.plot(*zip(*line), style, color=colour, marker="o", markersize=3, label=column)
            axis.set_title(mask, fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [length(n) for n in lengths])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
        figure.supylabel(name, fontsize=9)
        figure.supxlabel("tokens", fontsize=9)
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(2 * across, len(handles)),
                      frameon=False, fontsize=8)
    return figure


def length(n: int) -> str:
    """Tokens, short.

    >>> length(8192), length(1000)
    ('8K', '1000')
    """
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def heat_maps(found: Sequence[Entry]) -> dict[str, plt.Figure]:
    """mask x kernel, one figure a setting: colour is the rate, text the rate or why there is none."""
    unit, name = aggregate.unit_of(found)
    figures = {}
    for setting in aggregate.settings(found):
        masks, columns, cells = aggregate.pivot(found, setting)
        if any(e.rate for e in cells.values()):
            figures[f"{heading(setting)}: {name}"] = _heat_map(masks, columns, cells, unit, heading(setting))
    return figures


def _heat_map(masks, columns, cells, unit, title) -> plt.Figure:
    rates = np.full((len(masks), len(columns)), np.nan)
    for m, mask in enumerate(masks):
        for c, column in enumerate(columns):
            entry = cells.get((mask, column))
            if entry is not None and entry.rate:
                rates[m, c] = entry.rate / unit
    with plt.rc_context({**STYLE, "axes.grid": False}):
        size = max(5.0, 2.2 + 0.62 * len(columns)), 1.4 + 0.3 * len(masks)
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        axis.imshow(rates, cmap="viridis", vmin=0, aspect="auto")
        axis.set_xticks(range(len(columns)), [c.replace(" ", "\n") for c in columns], fontsize=7)
        axis.set_yticks(range(len(masks)), masks, fontsize=8)
        top = np.nanmax(rates)
        for m, mask in enumerate(masks):
            for c, column in enumerate(columns):
                dark = rates[m, c] < 0.6 * top  # False for NaN: no tile is drawn there
                axis.text(c, m, cell(cells.get((mask, column)), unit), ha="center", va="center", fontsize=7,
                          color="white" if dark else "black")
        axis.set_title(title, fontsize=9)
    return figure


def svg(figure: plt.Figure) -> str:
    """A figure to be inlined: transparent, in the page's own text colour."""
    out = io.StringIO()
    with plt.rc_context(STYLE):  # text as text
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text[text.index("<svg"):])  # a hundredth of a point is enough
    return re.sub(r"\n\s*", "\n", text).replace(INK, "currentColor")


def save_png(figure: plt.Figure, path: Path) -> None:
    """A figure as a file, black on white."""
    for artist in figure.findobj():
        for get, put in (("get_color", "set_color"), ("get_edgecolor", "set_edgecolor")):
            if hasattr(artist, get) and getattr(artist, get)() == INK:
                getattr(artist, put)("black")
    figure.savefig(path, dpi=130, facecolor="white")
