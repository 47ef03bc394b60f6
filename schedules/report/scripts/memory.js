// Memory through the step.

const most = Math.max(
  summary.peak_bytes, summary.unmodified_peak_bytes, summary.measured_peak_bytes ?? 0);
// Only the plan's own line is pointed at: else a moment of another curve could be the nearest.
const beside = { silent: true, tooltip: { show: false } };
const curve = (edges, bytes) =>
  [...bytes.map((value, i) => [edges[i], value]), [edges[bytes.length], bytes.at(-1)]];
const stepped = (name, data, more) => ({
  name, data, type: "line", step: "end", symbol: "none", animation: false,
  triggerLineEvent: false, ...more,
});
const bandsBy = () => page.bands[document.querySelector("input[name=by]:checked").value];
const sums = (changes) => {
  let sum = 0;
  return changes.map((change) => (sum += change));
};
const bandSeries = (band) =>
  stepped(band.name, curve(runs.edges, sums(band.changes)), {
    stack: "live", color: band.colour, lineStyle: { width: 0 },
    areaStyle: { opacity: 0.75 }, ...beside,
  });
const markBudget = () => (summary.budget_bytes && summary.budget_bytes <= 1.06 * most ? {
  silent: true, symbol: "none", animation: false,
  lineStyle: { color: page.colours.budget, type: "dashed", width: 2 },
  label: { formatter: "budget", color: colour("--ink"), position: "insideEndTop" },
  data: [{ yAxis: summary.budget_bytes }],
} : undefined);
const markPeak = () => ({
  symbol: "circle", symbolSize: 8, animation: false, itemStyle: { color: page.colours.plan },
  label: {
    formatter: () => `peak ${bytesText(summary.peak_bytes)}`, position: "top",
    color: colour("--ink"),
  },
  data: [{ coord: [runs.edges[page.peak_run], summary.peak_bytes] }],
});
const memory = () => {
  const bands = bandsBy().map(bandSeries);
  const others = [stepped("unmodified", curve(page.unmodified.edges, page.unmodified.live_bytes), {
    color: page.colours.unmodified, lineStyle: { width: 1.5 }, ...beside,
  })];
  if (page.measured) {
    others.push(stepped("measured", curve(page.measured.edges, page.measured.live_bytes), {
      color: page.colours.measured, lineStyle: { width: 1.5 }, ...beside,
    }));
  }
  const live = stepped("this plan", curve(runs.edges, runs.live_bytes), {
    color: page.colours.plan, lineStyle: { width: 1.5 },
    markLine: markBudget(), markPoint: markPeak(),
  });
  const names = [live, ...others, ...bands].map((series) => series.name);
  return {
    animation: false, grid: frame(narrow.matches ? 64 : 84),
    legend: legend(names), toolbox: toolbox(), dataZoom: zooms(),
    tooltip: { ...tooltip(), trigger: "axis", position: aside, formatter: byRun },
    xAxis: { type: "value", name: page.axis, nameLocation: "middle", nameGap: 26, min: 0,
      max: "dataMax", ...axisStyle(),
      axisLabel: { color: colour("--soft"), showMaxLabel: false, hideOverlap: true } },
    yAxis: byteAxis(1.06 * most, 5),
    series: [live, ...others, ...bands],
  };
};
