"""How the page looks: one style sheet for light and dark, wide and narrow, on paper too.

Runs differ by colour and by dash, so that neither is needed alone. Every colour of a line has a contrast of at least 3
to its background, text at least 4.5 (WCAG 2.2); a test computes them.
"""

LIGHT = {
    "back": "#ffffff", "panel": "#f6f7f9", "text": "#1b1f24", "muted": "#57606a", "rule": "#d5dae0",
    "c0": "#0064b0", "c1": "#c24a00", "c2": "#00795a", "c3": "#a63d85", "c4": "#6b5900", "c5": "#4a4f57",
}  # fmt: skip
DARK = {
    "back": "#12161b", "panel": "#1b2128", "text": "#e8ebee", "muted": "#a3adb8", "rule": "#38414b",
    "c0": "#62b3f5", "c1": "#ff9a52", "c2": "#3fcf9f", "c3": "#ec8fcb", "c4": "#dbc83a", "c5": "#c3cad2",
}  # fmt: skip
DASHES = ("none", "9 4", "2 4", "12 4 2 4", "6 3 2 3 2 3", "4 4")

_SHEET = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem clamp(.9rem,3vw,2.5rem) 3rem;max-width:96rem;background:var(--back);color:var(--text);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.15rem;margin:2.2rem 0 .7rem}
h3{font-size:1rem;margin:0 0 .4rem}
p{margin:.3rem 0;max-width:75ch}
.muted{color:var(--muted)}
.notes{margin:.8rem 0 0;padding-left:1.2rem;max-width:90ch}
.scroll{overflow-x:auto;max-width:100%}
.scroll:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.32rem .8rem;border-bottom:1px solid var(--rule);text-align:left;vertical-align:baseline}
td.n,th.n{text-align:right;white-space:nowrap}
thead th{border-bottom:2px solid var(--rule);vertical-align:bottom}
thead th.n{white-space:normal;min-width:9rem;overflow-wrap:break-word}
thead th.n span{justify-content:flex-end}
tbody th{font-weight:500;position:sticky;left:0;background:var(--back)}
tbody th small{display:block;font-weight:400;color:var(--muted);max-width:34ch;line-height:1.3}
td .ratio{color:var(--muted);font-size:.8125rem;display:inline-block;min-width:4.6rem;margin-left:.5rem}
td.v,th.v{overflow-wrap:anywhere;min-width:13rem;max-width:32rem}
code{font:.875em ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.legend{position:sticky;top:0;z-index:1;background:var(--back);padding:.5rem 0;display:flex;flex-wrap:wrap;
 gap:.2rem 1.4rem;border-bottom:1px solid var(--rule);margin-bottom:1rem;max-height:30vh;overflow-y:auto}
.legend span,thead th span{display:inline-flex;align-items:center;gap:.5rem;overflow-wrap:break-word}
.key{width:34px;height:10px;flex:none}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.2rem}
figure{margin:0;padding:.9rem;background:var(--panel);border:1px solid var(--rule);border-radius:8px;
 container-type:inline-size;min-width:0}
figcaption{font-size:.875rem;color:var(--muted);margin-top:.3rem}
.plot{width:100%;height:auto;display:block}
.plot text{font-size:15px;fill:var(--text)}
.plot text.name{fill:var(--muted)}
@container (max-width:440px){.plot text{font-size:21px}}
.grid{stroke:var(--rule);stroke-width:1}
.axis,.tick{stroke:var(--muted);stroke-width:1.2}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.band{opacity:.16}
.dot{stroke:var(--panel);stroke-width:1.5}
@media (max-width:40rem){tbody th small{display:none}
 th,td{padding:.32rem .5rem}tbody th{min-width:8.5rem;max-width:9.5rem}}
@media print{.legend{position:static}figure{break-inside:avoid}}
"""


def sheet() -> str:
    """The whole style sheet."""
    styles = "".join(
        f".s{place}{{stroke:var(--c{place});stroke-dasharray:{dash}}}.f{place}{{fill:var(--c{place})}}\n"
        for place, dash in enumerate(DASHES)
    )
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n{_SHEET}{styles}"
    )


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())
