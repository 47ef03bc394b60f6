// Time against peak.

const point = (found) => ({
  value: [found.peak_bytes, 100 * found.overhead], name: found.name,
});
const spot = (parameters) =>
  `<b>${escaped(parameters.name || parameters.seriesName)}</b><br>` +
  `peak ${bytesText(parameters.value[0])}<br>overhead ${percent(parameters.value[1] / 100)}`;
const bounds = (own) => {
  const best = new Map();
  const base = summary.time_us / (1 + summary.overhead);
  for (const points of Object.values(page.fronts)) {
    for (const found of points) {
      if (!found.lower_bound_us || !found.budget_bytes) continue;
      const bound = 100 * Math.max(found.lower_bound_us / base - 1, 0);
      best.set(found.budget_bytes, Math.max(best.get(found.budget_bytes) ?? 0, bound));
    }
  }
  if (own && summary.budget_bytes && summary.lower_bound_us) {
    const bound = 100 * Math.max(summary.lower_bound_us / base - 1, 0);
    best.set(summary.budget_bytes, Math.max(best.get(summary.budget_bytes) ?? 0, bound));
  }
  return [...best].sort((a, b) => a[0] - b[0]);
};
const peaks = () => [
  summary.peak_bytes,
  ...[...page.rules, ...Object.values(page.fronts).flat()].map((found) => found.peak_bytes),
];
const frontOption = () => {
  const series = Object.entries(page.fronts).map(([name, points]) => ({
    name, type: "line", symbolSize: 7, color: page.colours[`front ${name}`], animation: false,
    data: points.map(point).sort((a, b) => a.value[0] - b.value[0]),
  }));
  series.push(
    { name: "rules", type: "scatter", symbol: "rect", symbolSize: 9, animation: false,
      color: page.colours.unmodified, data: page.rules.map(point),
      label: { show: !narrow.matches, formatter: "{b}", position: "right",
        color: colour("--soft") },
      labelLayout: { hideOverlap: true } },
    { name: page.bound_name, type: "line", symbol: "diamond", symbolSize: 8, animation: false,
      color: page.colours.bound, lineStyle: { type: "dotted" }, 
      // A bound of the plan is proved; it is no part of a line that a file states.
      data: bounds(page.bound_name === "bound") },
    { name: "this plan", type: "scatter", symbol: "circle", symbolSize: 15, animation: false,
      color: page.colours.plan, data: [[summary.peak_bytes, 100 * summary.overhead]],
      markLine: summary.budget_bytes ? {
        silent: true, symbol: "none", animation: false,
        lineStyle: { color: page.colours.budget, type: "dashed", width: 2 },
        label: { formatter: "budget", color: colour("--ink") },
        data: [{ xAxis: summary.budget_bytes }],
      } : undefined });
  return {
    animation: false,
    grid: { left: 60, right: narrow.matches ? 20 : 90, top: 40, bottom: 50 },
    legend: legend(series.map((one) => one.name)),
    tooltip: { ...tooltip(), trigger: "item", formatter: spot },
    xAxis: { ...byteAxis(Math.max(...peaks()), narrow.matches ? 3 : 6, Math.min(...peaks())),
      name: "peak", nameLocation: "middle", nameGap: 28 },
    yAxis: { type: "value", name: "overhead, %", min: 0, ...axisStyle() },
    series,
  };
};
