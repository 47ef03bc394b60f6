// Draws the charts; again when the size or the colour scheme changes.

const charts = {
  memory: overRuns("memory", memory, (i) => runs.edges[i]),
  ribbon: overRuns("ribbon", ribbonOption, (i) => i),
};
const front = echarts.init(document.getElementById("front"), null, { renderer: "canvas" });
const drawAll = () => {
  charts.memory.draw();
  charts.ribbon.draw();
  front.setOption(frontOption(), { notMerge: true });
};
front.setOption(frontOption());
for (const input of document.querySelectorAll("input[name=by]")) {
  input.addEventListener("change", charts.memory.draw);
}
document.getElementById("to-peak").addEventListener("click", () =>
  charts.memory.moveTo(page.peak_run));
document.getElementById("show-all").addEventListener("click", () =>
  charts.memory.zoomTo(0, 100));
dark.addEventListener("change", drawAll);
addEventListener("resize", () => {
  for (const chart of [charts.memory.chart, charts.ribbon.chart, front]) chart.resize();
  drawAll();
});
