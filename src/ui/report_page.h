#pragma once

#include <string_view>

// Inside src/ui only: the fixed parts of the report page.

namespace heddle::ui {

inline constexpr std::string_view kReportStyle = R"css(
:root { color-scheme: light dark; --page: #fcfcfa; --card: #ffffff; --ink: #1c1c1a; --soft: #686862; --line: #e3e3dd;
  --s1: #1f63c6; --s2: #c4590a; --good: #1d7a43; --warn: #8a5a00; --warn-back: #fdf3dc; }
@media (prefers-color-scheme: dark) {
  :root { --page: #141413; --card: #1d1d1b; --ink: #ececea; --soft: #a3a39c; --line: #353532;
    --s1: #74a9ff; --s2: #f0a058; --good: #62c98c; --warn: #f0c469; --warn-back: #33290f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
.soft { color: var(--soft); }
.tile .soft, .head .soft { font-size: 13px; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.grid { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); margin-top: 22px; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.pair { grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); margin-top: 10px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; min-width: 0; }
.tile .value { font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; }
.head { display: flex; justify-content: space-between; gap: 12px; flex-wrap: wrap; align-items: baseline; }
.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin: 0 5px 3px 12px; }
.key.s1 { background: var(--s1); } .key.s2 { background: var(--s2); }
svg { width: 100%; height: auto; display: block; margin-top: 8px; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); } svg .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
svg path { fill: none; stroke-linejoin: round; }
svg .line { stroke-width: 2; } svg .raw { stroke-width: 1; opacity: .35; }
svg path.s1 { stroke: var(--s1); } svg path.s2 { stroke: var(--s2); }
svg circle.s1 { fill: var(--s1); } svg circle.s2 { fill: var(--s2); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
details, .block { margin-top: 14px; } summary { cursor: pointer; font-weight: 600; font-size: 14px; }
details[open] summary { margin-bottom: 8px; } .block h3 { margin-bottom: 6px; }
.warning { background: var(--warn-back); color: var(--warn); border-radius: 8px; padding: 8px 14px; margin-top: 8px; }
.label { font-size: 12px; font-weight: 600; color: var(--soft); margin-bottom: 4px; }
.after .label { color: var(--good); }
)css";

/// Shows the values under the pointer; the page is complete without it.
inline constexpr std::string_view kReportScript = R"js(
for (const svg of document.querySelectorAll('svg[data-x]')) {
  const [left, right, low, high] = svg.dataset.x.split(',').map(Number);
  const lines = [...svg.querySelectorAll('path[data-points]')].map(p => [p.dataset.name, JSON.parse(p.dataset.points)]);
  const readout = svg.parentNode.querySelector('.readout'), cursor = svg.querySelector('.cursor'), rest = readout.innerHTML;
  if (!cursor) continue;
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const at = (event.clientX - box.left) / box.width * view.width;
    const x = low + (at - left) / (right - left) * (high - low);
    const nearest = lines.filter(([, points]) => points.length).map(([name, points]) =>
      [name, points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
    if (!nearest.length) return;
    const drawn = left + (nearest[0][1][0] - low) / (high - low) * (right - left);
    cursor.setAttribute('x1', drawn); cursor.setAttribute('x2', drawn);
    readout.textContent = nearest.map(([name, [step, value]]) => `${name} ${value} at step ${step}`).join(', ');
  });
  svg.addEventListener('pointerleave', () => {
    cursor.setAttribute('x1', -9); cursor.setAttribute('x2', -9); readout.innerHTML = rest;
  });
}
)js";

}  // namespace heddle::ui
