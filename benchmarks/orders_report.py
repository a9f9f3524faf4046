"""From the results of `benchmarks.orders` to tables and figures in docs/kernels/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.curves import OMITTED, Curve, rate_at
from benchmarks.pages import fill, table
from benchmarks.seeds import KINDS, SEEDS, SPLITS, TAILS
from flashskip.geometry import ORDERS

DOCS = Path(__file__).parents[1] / "docs"
MODEL = "SmolLM2"
SHOWN = (-10.0, -7.0, -4.0)  # log2 of thresholds
MASSES = (0.001, 0.01)
ORDER_NAMES = {order: order.replace("_", ", ") for order in ORDERS}
Results = dict[str, Any]


def curves(results: Results) -> dict[tuple[Any, ...], Curve]:
    """Return each curve by its name."""
    return {tuple(curve["name"]): curve for curve in results["curves"]}


def tables(results: Results) -> dict[str, dict[str, str]]:
    """Return each table as Markdown, by page and name."""
    return {
        "prefill_sm90.md": {"orders": orders_table(results)},
        "decode_sm90.md": {"splits": splits_table(results), "tails": tails_table(results)},
    }


def write_pages(results: Results) -> None:
    """Replace what stands between the pages' pairs of marks."""
    for name, own in tables(results).items():
        fill(DOCS / "kernels" / name, own)


def orders_table(results: Results) -> str:
    """Skipped share and omitted mass at equal λ, then the share at equal mass."""
    own, log2 = curves(results), results["log2_thresholds"]
    header = ["order", "vote"]
    header += [f"λ = 2^{x:.0f}" for x in SHOWN] + [f"at {100 * x:g} %" for x in MASSES]
    body = []
    for order, name in ORDER_NAMES.items():
        for vote_kv in (64, 128):
            curve = own["order", order, vote_kv]
            at = [log2.index(x) for x in SHOWN]
            cells = [f"{_percent(curve['skipped'][i])}; {_mass(curve['omitted'][i])}" for i in at]
            body.append([name, str(vote_kv), *cells, *(_rate(curve, x) for x in MASSES)])
    return table(header, body)


def splits_table(results: Results) -> str:
    """Return the share skipped at OMITTED, seeded and by splits that restart."""
    own = curves(results)
    header = ["heads", "seeded, any splits", *(f"restarting, {n}" for n in SPLITS)]
    body = []
    for kind in (MODEL, *KINDS):
        restarting = [_rate(own["split", kind, n]) for n in SPLITS]
        body.append([kind, _rate(own["tail", kind, TAILS[-1]]), *restarting])
    return table(header, body)


def tails_table(results: Results) -> str:
    """Return the share skipped at OMITTED by keys in the last tile."""
    own = curves(results)
    body = [["kernel", *(_rate(own["tail", MODEL, n]) for n in TAILS)]]
    for name in SEEDS:
        if ("reference", MODEL, name, TAILS[0]) in own:
            body.append([name, *(_rate(own["reference", MODEL, name, n]) for n in TAILS)])
    return table(["seed", *map(str, TAILS)], body)


def write_figures(results: Results) -> None:
    """Draw prefill in `orders.svg`, decode in `splits.svg`."""
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "flashskip"  # the same file from the same results
    mpl.rcParams["font.size"] = 9
    for name, draw in (("orders", _draw_orders), ("splits", _draw_splits)):
        figure = draw(results)
        m = results["machine"]
        source = f"{results['model']}, {m.get('gpu', m['device'])}, {results['date'][:10]}"
        figure.supxlabel(source, fontsize=7.5, color="#8a8a8a")
        figure.savefig(DOCS / "figures" / f"{name}.svg", metadata={"Date": None})


def _draw_orders(results: Results) -> Any:
    from matplotlib.figure import Figure

    from benchmarks.plot import tidy

    figure = Figure(figsize=(10, 4), layout="constrained")
    equal_threshold, equal_mass = figure.subplots(1, 2, sharey=True)
    colours = ("#1f6fb4", "#2a8a57", "#c4541a")
    own = curves(results)
    for (order, name), colour in zip(ORDER_NAMES.items(), colours, strict=True):
        for vote_kv, style in ((64, "-"), (128, "--")):
            curve = own["order", order, vote_kv]
            y = [100 * x for x in curve["skipped"]]
            how = {"color": colour, "ls": style, "label": f"{name}, votes of {vote_kv}"}
            equal_threshold.plot([2**x for x in results["log2_thresholds"]], y, **how)
            equal_mass.plot([100 * x for x in curve["omitted"]], y, **how)
    equal_threshold.set(xscale="log", xlabel="λ", ylabel="tiles skipped, %")
    equal_mass.set(xscale="log", xlabel="omitted softmax mass, mean over rows, %", xlim=(1e-3, 30))
    equal_mass.axvline(100 * results["omitted"], color="#8a8a8a", lw=0.8)
    equal_mass.legend(frameon=False, fontsize=7.5)
    tidy(equal_threshold, equal_mass)
    return figure


def _draw_splits(results: Results) -> Any:
    from matplotlib.figure import Figure

    from benchmarks.plot import tidy

    own, kinds = curves(results), (MODEL, "sink")
    figure = Figure(figsize=(10, 4), layout="constrained")
    *panels, tails = figure.subplots(1, 3, sharey=True)
    for axes, kind in zip(panels, kinds, strict=True):
        seeded = 100 * rate_at(own["tail", kind, TAILS[-1]])[0]
        restarting = [100 * rate_at(own["split", kind, n])[0] for n in SPLITS]
        axes.plot(SPLITS, [seeded] * len(SPLITS), "o-", color="#1f6fb4", label="seeded")
        axes.plot(SPLITS, restarting, "o-", color="#c4541a", label="restarting")
        axes.set(title=f"{kind} heads", xscale="log", xlabel="splits")
        axes.set_xticks(SPLITS, map(str, SPLITS), minor=False)
    for name in SEEDS:
        if ("reference", MODEL, name, TAILS[0]) in own:
            rates = [100 * rate_at(own["reference", MODEL, name, n])[0] for n in TAILS]
            tails.plot(TAILS, rates, ".-", label=name)
    tails.set(title=f"{MODEL} heads", xlabel="keys in the last tile")
    panels[0].set_ylabel(f"% skipped at {100 * results['omitted']:g} % omitted")
    for axes in (panels[0], tails):
        axes.legend(frameon=False, fontsize=7.5)
    tidy(*panels, tails)
    return figure


def _rate(curve: Curve, omitted: float = OMITTED) -> str:
    """Give the share; that of λ = 1, said so, where even that omits less."""
    share, reached = rate_at(curve, omitted)
    return _percent(share) if reached else f"{_percent(share)} (λ = 1)"


def _percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def _mass(x: float) -> str:
    return f"{100 * x:.2g} %"
