"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const { ops, values, runs, stays, summary } = page;
  const count = runs.op.length;
  const at = (texts, i) => texts.texts[texts.index[i]];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const MOST_LIVE = 5;

  // Text: the same formatter as the tables'.
  const scaled = (bytes, largest) => {
    const units = [[2 ** 30, "GiB", 2], [2 ** 20, "MiB", largest >= 10 * 2 ** 20 ? 1 : 2]];
    for (const [unit, name, digits] of units) {
      if (Math.abs(largest) >= unit) return `${(bytes / unit).toFixed(digits)} ${name}`;
    }
    return `${(bytes / 2 ** 10).toFixed(1)} KiB`;
  };
  const bytesText = (bytes) => scaled(bytes, bytes);
  const percent = (fraction) => `${(100 * fraction).toFixed(2)} %`;
  const escaped = (text) =>
    text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

  // What is live while run i runs, largest first.
  const liveAt = (i) => {
    const live = [];
    for (let k = 0; k < stays.value.length; k += 1) {
      if (stays.begin[k] <= i && i < stays.end[k]) live.push(stays.value[k]);
    }
    return live.sort((a, b) => values.size_bytes[b] - values.size_bytes[a]);
  };
  const lines = (i) => {
    const op = runs.op[i];
    const phase = runs.again[i] ? "computed again" : ops.backward[op] ? "backward" : "forward";
    const live = liveAt(i);
    const moduleOf = (v) => at(ops.module, values.producer[v]);
    const shown = live.slice(0, MOST_LIVE).map(
      (v) => `${values.name[v]} ${bytesText(values.size_bytes[v])} ${moduleOf(v)}`.trim());
    const rest = live.slice(MOST_LIVE).reduce((sum, v) => sum + values.size_bytes[v], 0);
    if (rest) shown.push(`${live.length - MOST_LIVE} more ${bytesText(rest)}`);
    return {
      title: `${ops.name[op]}, ${at(ops.target, op)}`,
      facts: [
        `${bytesText(runs.live_bytes[i])} live`,
        `run ${i + 1} of ${count}, ${phase}, ${(ops.cost_us[op] / 1000).toFixed(3)} ms`,
        [at(ops.module, op), at(ops.source, op)].filter(Boolean).join(", "),
      ].filter(Boolean),
      live: shown,
    };
  };
  const htmlOf = (i) => {
    const said = lines(i);
    const rows = [`<b>${escaped(said.title)}</b>`, ...said.facts.map(escaped),
      ...said.live.map((text) => `· ${escaped(text)}`)];
    return rows.join("<br>");
  };
  const textOf = (i) => {
    const said = lines(i);
    return `${said.title}: ${said.facts.join("; ")}. Largest live: ${said.live.join(", ")}.`;
  };

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axisStyle = () => ({
    axisLine: { lineStyle: { color: colour("--line") } },
    axisLabel: { color: colour("--soft") },
    nameTextStyle: { color: colour("--soft") },
    splitLine: { lineStyle: { color: colour("--line"), opacity: 0.5 } },
  });
  const tooltip = () => ({
    confine: true,
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
      if (event.dataIndex !== undefined && event.seriesIndex === 0) cursor = event.dataIndex;
    });
    draw();
    return { chart, draw, moveTo, zoomTo };
  };
  const byRun = (parameters) => {
    const found = parameters.find((p) => p.seriesIndex === 0);
    return found ? htmlOf(found.dataIndex) : "";
  };

  // Memory through the step.
  const unit = Math.max(summary.peak_bytes, summary.unmodified_peak_bytes, summary.budget_bytes);
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
      areaStyle: { opacity: 0.75 }, silent: true,
    });
  const markBudget = () => (summary.budget_bytes ? {
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
      color: page.colours.unmodified, lineStyle: { width: 1.5 }, silent: true,
    })];
    if (page.measured) {
      others.push(stepped("measured", curve(page.measured.edges, page.measured.live_bytes), {
        color: page.colours.measured, lineStyle: { width: 1.5 }, silent: true,
      }));
    }
    const live = stepped("this plan", curve(runs.edges, runs.live_bytes), {
      color: page.colours.plan, lineStyle: { width: 1.5 },
      markLine: markBudget(), markPoint: markPeak(),
    });
    const names = [live, ...others, ...bands].map((series) => series.name);
    return {
      aria: { enabled: true }, animation: false, grid: frame(narrow.matches ? 64 : 84),
      legend: legend(names), toolbox: toolbox(), dataZoom: zooms(),
      tooltip: { ...tooltip(), trigger: "axis", formatter: byRun },
      xAxis: { type: "value", name: page.axis, nameLocation: "middle", nameGap: 26, min: 0,
        max: "dataMax", ...axisStyle() },
      yAxis: { type: "value", min: 0, ...axisStyle(),
        axisLabel: { color: colour("--soft"), formatter: (value) => scaled(value, unit) } },
      series: [live, ...others, ...bands],
    };
  };

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
    lineStyle: { width: Math.max(rowHeight() * height, 1.5), cap: "butt", opacity: shade[1] },
  });
  const ribbonOption = () => ({
    aria: { enabled: true }, animation: false,
    grid: { ...frame(narrow.matches ? 84 : 150) },
    legend: legend(["forward", "backward", "recompute", "kept", "kept, most of it"]),
    toolbox: toolbox(), dataZoom: zooms(),
    tooltip: { ...tooltip(), trigger: "axis", formatter: byRun },
    xAxis: { type: "value", name: "runs of ops", nameLocation: "middle", nameGap: 26, min: 0,
      max: count, ...axisStyle() },
    yAxis: { type: "value", min: -0.5, max: titles.length - 0.5, inverse: true,
      interval: 1, ...axisStyle(), splitLine: { show: false }, axisTick: { show: false },
      axisLabel: { show: false } },
    series: [
      { name: "runs", type: "line", data: runs.op.map((_, i) => [i, -0.5]), symbol: "none",
        lineStyle: { opacity: 0 }, animation: false,
        markLine: { silent: true, symbol: "none", animation: false,
          label: { formatter: "backward", color: colour("--soft"), position: "insideEndTop" },
          lineStyle: { color: colour("--soft"), type: "dotted" },
          data: [{ xAxis: page.forward_runs }] } },
      spans("holds", "kept", ["kept", 0.25], 0.9),
      spans("holds_most", "kept, most of it", ["kept", 0.5], 0.9),
      spans("forward", "forward", ["forward", 1], 0.6),
      spans("backward", "backward", ["backward", 1], 0.6),
      spans("recompute", "recompute", ["recompute", 1], 0.6),
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

  // Time against peak.
  const point = (found) => ({
    value: [found.peak_bytes, 100 * found.overhead], name: found.name,
  });
  const spot = (parameters) =>
    `<b>${escaped(parameters.name || parameters.seriesName)}</b><br>` +
    `peak ${bytesText(parameters.value[0])}<br>overhead ${percent(parameters.value[1] / 100)}`;
  const bounds = () => {
    const best = new Map();
    const base = summary.time_us / (1 + summary.overhead);
    for (const points of Object.values(page.fronts)) {
      for (const found of points) {
        if (!found.lower_bound_us || !found.budget_bytes) continue;
        const bound = 100 * Math.max(found.lower_bound_us / base - 1, 0);
        best.set(found.budget_bytes, Math.max(best.get(found.budget_bytes) ?? 0, bound));
      }
    }
    if (summary.budget_bytes && summary.lower_bound_us) {
      const bound = 100 * Math.max(summary.lower_bound_us / base - 1, 0);
      best.set(summary.budget_bytes, Math.max(best.get(summary.budget_bytes) ?? 0, bound));
    }
    return [...best].sort((a, b) => a[0] - b[0]);
  };
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
      { name: "bound", type: "line", symbol: "diamond", symbolSize: 8, animation: false,
        color: page.colours.bound, lineStyle: { type: "dotted" }, data: bounds() },
      { name: "this plan", type: "scatter", symbol: "circle", symbolSize: 15, animation: false,
        color: page.colours.plan, data: [[summary.peak_bytes, 100 * summary.overhead]],
        markLine: summary.budget_bytes ? {
          silent: true, symbol: "none", animation: false,
          lineStyle: { color: page.colours.budget, type: "dashed", width: 2 },
          label: { formatter: "budget", color: colour("--ink") },
          data: [{ xAxis: summary.budget_bytes }],
        } : undefined });
    return {
      aria: { enabled: true }, animation: false,
      grid: { left: 60, right: narrow.matches ? 20 : 90, top: 40, bottom: 50 },
      legend: legend(series.map((one) => one.name)),
      tooltip: { ...tooltip(), trigger: "item", formatter: spot },
      xAxis: { type: "value", name: "peak", nameLocation: "middle", nameGap: 28, scale: true,
        ...axisStyle(),
        axisLabel: { color: colour("--soft"), hideOverlap: true,
          formatter: (value) => scaled(value, unit) } },
      yAxis: { type: "value", name: "overhead, %", min: 0, ...axisStyle() },
      series,
    };
  };

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
})();
