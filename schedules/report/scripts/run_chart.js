// What charts over runs have in common: style, hovering, zooming, keys.

const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axisStyle = () => ({
  axisLine: { lineStyle: { color: colour("--line") } },
  axisLabel: { color: colour("--soft") },
  nameTextStyle: { color: colour("--soft") },
  splitLine: { lineStyle: { color: colour("--line"), opacity: 0.5 } },
});
// An axis in bytes: ticks at round numbers of a unit, about `ticks` of them.
const byteAxis = (largest, ticks, least = 0) => {
  const unit = largest >= 2 ** 30 ? 2 ** 30 : largest >= 2 ** 20 ? 2 ** 20 : 2 ** 10;
  const rough = (largest - least) / unit / ticks;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const interval = [1, 2, 2.5, 3, 4, 5, 10].map((k) => k * power).find((k) => k >= rough) * unit;
  const name = unit === 2 ** 30 ? "GiB" : unit === 2 ** 20 ? "MiB" : "KiB";
  const formatter = (value) => `${Number((value / unit).toFixed(3))} ${name}`;
  return {
    type: "value", ...axisStyle(), interval,
    min: Math.floor(least / interval) * interval, max: Math.ceil(largest / interval) * interval,
    axisLabel: { color: colour("--soft"), hideOverlap: true, formatter },
  };
};
// In the other upper corner of the chart, where a step has little live; on a narrow screen below.
const aside = (point, _, element, __, size) => {
  if (narrow.matches) return [0, size.viewSize[1] - 8];
  const isLeft = point[0] < size.viewSize[0] / 2;
  return [isLeft ? size.viewSize[0] - size.contentSize[0] - 20 : 90, 44];
};
const tooltip = () => ({
  confine: !narrow.matches,
  backgroundColor: colour("--well"),
  borderColor: colour("--line"),
  textStyle: { color: colour("--ink"), fontSize: 12 },
  extraCssText: "max-width:min(34rem,92vw);white-space:normal;overflow-wrap:anywhere",
});
const legend = (data) => ({
  type: "scroll", top: 0, data, textStyle: { color: colour("--ink") },
  pageTextStyle: { color: colour("--ink") }, pageIconColor: colour("--ink"),
});
const frame = (left) => ({ left, right: 16, top: 40, bottom: 74 });
const zooms = () => [
  { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, filterMode: "none" },
  { type: "slider", height: 22, bottom: 8, filterMode: "none", showDetail: false,
    textStyle: { color: colour("--soft") } },
];
const dragToZoom = { dataZoom: { yAxisIndex: "none", filterMode: "none", show: true } };
const toolbox = () => ({
  feature: dragToZoom, right: 8, top: -40, iconStyle: { borderColor: colour("--soft") },
});

// One chart over runs: hovering, zooming and keys are the same for all.
const overRuns = (id, option, xOf) => {
  const element = document.getElementById(id);
  const chart = echarts.init(element, null, { renderer: "canvas" });
  const said = document.getElementById(`${id}-said`);
  let cursor = page.peak_run;
  const range = () => {
    const zoom = chart.getOption().dataZoom[0];
    return [zoom.start, zoom.end];
  };
  const zoomTo = (start, end) =>
    chart.dispatchAction({ type: "dataZoom", start: Math.max(start, 0), end: Math.min(end, 100) });
  const share = (i) => (100 * xOf(i)) / xOf(count);
  const draw = () => {
    chart.setOption(option(), { notMerge: true });
    chart.dispatchAction(
      { type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
  };
  const moveTo = (i) => {
    cursor = Math.min(Math.max(i, 0), count - 1);
    const [start, end] = range();
    const place = share(cursor);
    if (place < start || place > end) {
      const half = (end - start) / 2;
      const middle = Math.min(Math.max(place, half), 100 - half);
      zoomTo(middle - half, middle + half);
    }
    chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: cursor });
    said.textContent = textOf(cursor);
  };
  const zoomBy = (factor) => {
    const [start, end] = range();
    const half = Math.min(((end - start) * factor) / 2, 50);
    const middle = Math.min(Math.max(share(cursor), half), 100 - half);
    zoomTo(middle - half, middle + half);
  };
  const inView = () => {
    const [start, end] = range();
    return Math.max(Math.round((count * (end - start)) / 100 / 20), 1);
  };
  const keys = {
    ArrowRight: () => moveTo(cursor + 1), ArrowLeft: () => moveTo(cursor - 1),
    PageDown: () => moveTo(cursor + inView()), PageUp: () => moveTo(cursor - inView()),
    Home: () => moveTo(0), End: () => moveTo(count - 1),
    p: () => moveTo(page.peak_run),
    "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
    0: () => zoomTo(0, 100), Escape: () => chart.dispatchAction({ type: "hideTip" }),
  };
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
  element.addEventListener("focus", () => moveTo(cursor));
  chart.on("updateAxisPointer", (event) => {
    if (event.dataIndex < count && event.seriesIndex === 0) cursor = event.dataIndex;
  });
  draw();
  return { chart, draw, moveTo, zoomTo };
};
const byRun = (parameters) => {
  const found = parameters.find((p) => p.seriesIndex === 0);
  return found ? htmlOf(Math.min(found.dataIndex, count - 1)) : "";
};
