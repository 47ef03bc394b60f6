// The schedule, a row a layer.

const titles = page.ribbon.titles;
const segments = (flat) => {
  const data = [];
  for (let k = 0; k < flat.length; k += 3) {
    data.push([flat[k + 1], flat[k]], [flat[k + 2], flat[k]], [null, null]);
  }
  return data;
};
const ribbonElement = document.getElementById("ribbon");
ribbonElement.style.height = `${Math.min(Math.max(titles.length * 22, 140), 1100) + 114}px`;
const rowHeight = () => (ribbonElement.clientHeight - 114) / titles.length;
const spans = (name, label, shade, height) => ({
  name: label, type: "line", data: segments(page.ribbon.spans[name]), symbol: "none",
  silent: true, animation: false, color: page.colours[shade[0]], tooltip: { show: false },
  itemStyle: { opacity: shade[1] },
  lineStyle: { width: Math.max(rowHeight() * height, 1.5), cap: "butt", opacity: shade[1] },
});
// What runs again is little where memory is ample: marks stay visible however narrow their run.
const recomputed = () => {
  const flat = page.ribbon.spans.recompute;
  const marks = flat.filter((_, k) => k % 3 === 0).map((row, k) => [flat[3 * k + 1], row]);
  return {
    name: "recompute", type: "scatter", data: marks, symbol: "rect", silent: true,
    symbolSize: [2.5, Math.max(rowHeight() * 0.6, 2)], symbolOffset: [1, 0], animation: false,
    color: page.colours.recompute, tooltip: { show: false },
  };
};
const ribbonOption = () => ({
  animation: false,
  grid: { ...frame(narrow.matches ? 84 : 150) },
  legend: legend(["forward", "backward", "recompute", "kept", "kept, most of it"]),
  toolbox: toolbox(), dataZoom: zooms(),
  tooltip: { ...tooltip(), trigger: "axis", position: aside, formatter: byRun },
  xAxis: { type: "value", name: "runs of ops", nameLocation: "middle", nameGap: 26, min: 0,
    max: count, ...axisStyle(),
    axisLine: { onZero: false, lineStyle: { color: colour("--line") } },
    axisLabel: { color: colour("--soft"), showMaxLabel: false, hideOverlap: true } },
  yAxis: { type: "value", min: -0.5, max: titles.length - 0.5, inverse: true,
    interval: 1, ...axisStyle(), splitLine: { show: false }, axisTick: { show: false },
    axisLabel: { show: false } },
  series: [
    { name: "runs", type: "line", data: runs.op.map((_, i) => [i, -0.5]), symbol: "none",
      lineStyle: { opacity: 0 }, animation: false,
      markLine: { silent: true, symbol: "none", animation: false,
        label: { show: false },
        lineStyle: { color: colour("--soft"), type: "dotted" },
        data: [{ xAxis: page.forward_runs }] } },
    spans("holds", "kept", ["kept", 0.25], 0.9),
    spans("holds_most", "kept, most of it", ["kept", 0.5], 0.9),
    spans("forward", "forward", ["forward", 1], 0.6),
    spans("backward", "backward", ["backward", 1], 0.6),
    spans("recompute", "recompute", ["recompute", 1], 0.6),
    recomputed(),
  ],
  graphic: rowTitles(),
});
const rowTitles = () => {
  const every = Math.max(Math.ceil(15 / rowHeight()), 1);
  const width = narrow.matches ? 78 : 142;
  return titles.filter((_, row) => row % every === 0).map((text, k) => ({
    type: "text", left: 4, top: 40 + (k * every + 0.5) * rowHeight() - 7, silent: true,
    style: { text, fill: colour("--soft"), fontSize: 12, width, overflow: "truncate" },
  }));
};
