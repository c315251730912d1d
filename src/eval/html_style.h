#pragma once
// The style sheet of a report's page. Colours are variables, so that charts follow a dark screen.
#include <string_view>

namespace clo {

inline constexpr std::string_view kPageStyle = R"(
:root { --ink:#1d2733; --dim:#657386; --grid:#e3e8ee; --page:#f5f7f9; --card:#ffffff; --line:#d8dee6 }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e7edf4; --dim:#93a1b3; --grid:#2b3644; --page:#10161d; --card:#18212b; --line:#2b3644 } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width:1180px; margin:0 auto; padding:32px 24px 64px }
h1 { font-size:28px; margin:0 } h2 { font-size:18px; margin:36px 0 12px }
.sub { color:var(--dim); margin:4px 0 20px }
dl { display:grid; grid-template-columns:max-content 1fr; gap:2px 16px; font-size:13px; margin:0 0 8px }
dt { color:var(--dim) } dd { margin:0; font-family:ui-monospace, Menlo, monospace; overflow-wrap:anywhere }
.tiles { display:grid; grid-template-columns:repeat(auto-fit, minmax(220px, 1fr)); gap:14px }
.tile, figure, .table { background:var(--card); border:1px solid var(--line); border-radius:12px;
  padding:16px 18px }
.tile { border-top:4px solid var(--mark) }
.tile b { font-size:30px; display:block; line-height:1.2 } .tile h3 { margin:0; font-size:15px }
.tile p { margin:4px 0 0; color:var(--dim); font-size:13px }
.charts { display:flex; flex-wrap:wrap; gap:14px; align-items:flex-start }
figure { margin:0; overflow-x:auto; max-width:100% } figcaption { font-weight:600; margin-bottom:8px }
svg { font-family:inherit; display:block }
.legend { display:flex; flex-wrap:wrap; gap:6px 18px; font-size:13px; margin:0 0 12px }
.legend i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px;
  vertical-align:-1px }
.table { overflow-x:auto; padding:6px 12px }
table { border-collapse:collapse; width:100%; font-size:13px; font-variant-numeric:tabular-nums }
th, td { padding:6px 10px; text-align:right; border-bottom:1px solid var(--grid); white-space:nowrap }
th { color:var(--dim); font-weight:600 } td.name, th.name { text-align:left }
tr:last-child td { border-bottom:none } tr.all td { font-weight:600 }
td.bad { color:#d0453f } td.good { color:#1f9d6b }
)";

}  // namespace clo
