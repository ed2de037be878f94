const MARGIN = { left: 46, right: 14, bottom: 38 };
const LETTER = 6.6; // of the charts' text, in pixels

const MARKS = [
  { key: 'p50', dash: null },
  { key: 'p90', dash: '5 3' },
  { key: 'p99', dash: '1.5 2.5' },
];

function textAt(x, y, text, attributes) {
  return svg('text', { x, y, ...attributes }, text);
}

function frame(width, height, label) {
  return svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
}

function xAxis(root, { low, high, scale, x, width, y, title }) {
  const most = Math.max(2, Math.floor((width - MARGIN.left - MARGIN.right) / 50));
  for (const tick of ticks(low * scale.factor, high * scale.factor, most)) {
    const place = x(tick.value / scale.factor);
    root.append(
      svg('line', { class: 'axis', x1: place, x2: place, y1: y, y2: y + 4 }),
      textAt(place, y + 16, tick.text, { class: 'tick', 'text-anchor': 'middle' }),
    );
  }
  const middle = MARGIN.left + (width - MARGIN.left - MARGIN.right) / 2;
  root.append(textAt(middle, y + 32, title, { class: 'unit', 'text-anchor': 'middle' }));
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

// The baselines of all runs are one series, which belongs to none.
const seriesName = (series) => (series.run === null ? 'whole KV' : RUNS.length > 1 ? LETTERS[series.run] : '');
const colourOf = (run) => (run === null ? 'baseline' : `run-${run % COLOURS}`);

function histogram(chart, width) {
  const single = chart.series.length === 1;
  const lane = single ? 110 : 58;
  const head = single ? 18 : 27;
  const height = 4 + chart.series.length * (lane + head) + MARGIN.bottom;
  const scale = scaleOf(chart.unit, chart.high);
  const root = frame(width, height, `${chart.title}: histogram. The table has its figures.`);
  const right = width - MARGIN.right;
  const x = linear(chart.low, chart.high, MARGIN.left, right);
  const bins = chart.series[0].counts.length;
  const bin = (right - MARGIN.left) / bins;
  chart.series.forEach((series, place) => {
    const bottom = 4 + (place + 1) * (lane + head);
    const top = Math.max(...series.counts);
    const y = linear(0, top, bottom, bottom - lane);
    for (const mark of top > 1 ? [0, top] : [top]) {
      root.append(
        svg('line', { class: mark ? 'grid' : 'axis', x1: MARGIN.left, x2: right, y1: y(mark), y2: y(mark) }),
        textAt(MARGIN.left - 6, y(mark) + 4, count(mark), { class: 'tick', 'text-anchor': 'end' }),
      );
    }
    root.append(svg('line', { class: 'axis', x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }));
    series.counts.forEach((number, index) => {
      if (!number) return;
      const width = (chart.high - chart.low) / bins;
      const from = chart.low + index * width;
      const range = [from, from + width].map((value) => digits(value * scale.factor)).join(' to ');
      const bar = svg('rect', {
        class: `bar ${colourOf(series.run)}`,
        x: MARGIN.left + index * bin + 0.5,
        y: y(number),
        width: Math.max(1, bin - 1),
        height: bottom - y(number),
      });
      bar.append(svg('title', null, `${range} ${scale.unit}: ${count(number)} ${chart.counted}`));
      root.append(bar);
    });
    // Labels stand from left to right, one that would touch the one before is left out.
    const name = seriesName(series);
    let free = MARGIN.left;
    if (name) {
      root.append(textAt(MARGIN.left, bottom - lane - 5, name, { class: `name ${colourOf(series.run)}` }));
      free += (name.length + 1) * LETTER * 1.1;
    }
    for (const mark of MARKS) {
      const at = x(series.distribution[mark.key]);
      const line = { class: 'mark', x1: at, x2: at, y1: bottom - lane - 1, y2: bottom };
      root.append(svg('line', { ...line, 'stroke-dasharray': mark.dash }));
      if (at - 12 > free && at + 12 < width) {
        const label = { class: 'tick strong', 'text-anchor': 'middle' };
        root.append(textAt(at, bottom - lane - 5, mark.key, label));
        free = at + 12;
      }
    }
    const mean = x(series.distribution.mean);
    if (mean <= right) {
      root.append(svg('path', { class: 'mean', d: `M${mean} ${bottom - 5}l4.5 5l-4.5 5l-4.5 -5z` }));
    }
    if (series.above) {
      const label = { class: 'tick over', 'text-anchor': 'end' };
      root.append(textAt(right, bottom - lane + 12, `+${count(series.above)} →`, label));
    }
  });
  const isCut = chart.series.some((series) => series.above);
  const title = `${scale.unit} (height: ${chart.counted}${isCut ? ', + n →: beyond the axis' : ''})`;
  xAxis(root, { low: chart.low, high: chart.high, scale, x, width, y: height - MARGIN.bottom, title });
  return root;
}

function distributionTable(chart) {
  const scale = scaleOf(chart.unit, chart.high);
  const named = chart.series.length > 1 || RUNS.length > 1;
  const head = [named ? (RUNS.length > 1 ? 'run' : 'KV') : null, chart.counted, 'mean', 'p50', 'p90', 'p99'].filter((each) => each);
  return el(
    'table',
    { class: 'figures' },
    el('caption', { class: 'hidden' }, `${chart.title} in ${scale.unit}`),
    el('thead', null, el('tr', null, head.map((text) => el('th', { scope: 'col' }, text)))),
    el(
      'tbody',
      null,
      chart.series.map((series) => {
        const { count: number, mean, p50, p90, p99 } = series.distribution;
        return el(
          'tr',
          null,
          named ? el('th', { scope: 'row' }, series.run === null ? (RUNS.length > 1 ? 'whole KV' : 'whole') : badge(series.run) || 'edited') : null,
          el('td', null, count(number)),
          [mean, p50, p90, p99].map((value) => el('td', null, digits(value * scale.factor))),
        );
      }),
    ),
  );
}

// Each row by when it came to its end: where a night went slow, and where it failed.
function timeline(width) {
  const lanes = RUNS.map((run, number) => ({ number, points: [], failed: [] }));
  for (const entry of DATA.entries) {
    entry.rows.forEach((row, number) => {
      if (!row) return;
      const value = row.metrics && row.metrics.e2e_latency;
      if (row.error) lanes[number].failed.push(row.order);
      else if (value) lanes[number].points.push([row.order, value]);
    });
  }
  const highest = Math.max(0, ...lanes.map((lane) => lane.points.reduce((most, one) => Math.max(most, one[1]), 0)));
  if (!highest) return null;
  const longest = Math.max(2, ...RUNS.map((run) => run.rows));
  const scale = scaleOf('s', highest);
  const lane = RUNS.length === 1 ? 150 : 80;
  const head = 20;
  const height = 4 + lanes.length * (lane + head) + MARGIN.bottom;
  const root = frame(width, height, 'End-to-end latency of each row, in the order of completion.');
  const right = width - MARGIN.right;
  const x = linear(1, longest, MARGIN.left + 3, right - 3);
  lanes.forEach(({ number, points, failed }, place) => {
    const bottom = 4 + (place + 1) * (lane + head);
    const y = linear(0, highest * 1.04, bottom, bottom - lane);
    for (const tick of ticks(0, highest * scale.factor, RUNS.length === 1 ? 4 : 2)) {
      const at = y(tick.value / scale.factor);
      root.append(
        svg('line', { class: tick.value ? 'grid' : 'axis', x1: MARGIN.left, x2: right, y1: at, y2: at }),
        textAt(MARGIN.left - 6, at + 4, tick.text, { class: 'tick', 'text-anchor': 'end' }),
      );
    }
    const dots = points.map(([order, value]) => `M${x(order).toFixed(1)} ${y(value).toFixed(1)}h0`).join('');
    root.append(svg('path', { class: `dots run-${number % COLOURS}`, d: dots }));
    const crosses = failed.map((order) => `M${(x(order) - 3).toFixed(1)} ${bottom - lane - 10}l6 6m0 -6l-6 6`);
    if (RUNS.length > 1) {
      const name = { class: `name run-${number % COLOURS}` };
      root.append(textAt(4, bottom - lane - 3, LETTERS[number], name));
    }
    if (failed.length) {
      const cross = svg('path', { class: 'cross', d: crosses.join('') });
      cross.append(svg('title', null, many(failed.length, 'failed row')));
      root.append(cross);
    }
  });
  const title = `row, by completion (height: ${scale.unit}, ×: failed)`;
  xAxis(root, { low: 1, high: longest, scale: { factor: 1 }, x, width, y: height - MARGIN.bottom, title });
  return root;
}

function kvBars(width) {
  const runs = RUNS.map((run, number) => ({ ...run, number })).filter((run) => run.tokens_before);
  if (!runs.length) return null;
  const inBytes = runs.some((run) => run.bytes_before);
  const key = inBytes ? 'bytes' : 'tokens';
  const highest = Math.max(...runs.map((run) => Math.max(run[`${key}_before`], run[`${key}_after`])));
  const scale = inBytes ? scaleOfBytes(highest) : { unit: 'tokens', factor: 1 };
  const bar = 18;
  const lane = 2 * bar + 30;
  const height = 4 + runs.length * lane + MARGIN.bottom;
  const root = frame(width, height, 'KV of all rows before and after the edits.');
  const left = MARGIN.left + 8;
  const x = linear(0, highest, left, width - MARGIN.right);
  runs.forEach((run, place) => {
    const top = 4 + place * lane;
    const name = RUNS.length > 1 ? `${LETTERS[run.number]}  ` : '';
    const tokens = `${count(run.tokens_before)} → ${count(run.tokens_after)} tokens`;
    const label = `${name}${tokens}, ${share(run.tokens_after, run.tokens_before)} kept`;
    root.append(textAt(left, top + 13, label, { class: RUNS.length > 1 ? `name run-${run.number % COLOURS}` : 'tick strong' }));
    ['before', 'after'].forEach((when, line) => {
      const y = top + 20 + line * (bar + 2);
      const value = run[`${key}_${when}`];
      const kind = when === 'before' ? ' pale' : '';
      const rect = svg('rect', {
        class: `bar run-${run.number % COLOURS}${kind}`, x: left, y, width: Math.max(1, x(value) - left), height: bar,
      });
      rect.append(svg('title', null, `${when}: ${inBytes ? size(value) : many(value, 'token')}`));
      root.append(rect, textAt(left - 6, y + 13, when, { class: 'tick', 'text-anchor': 'end' }));
    });
  });
  const y = height - MARGIN.bottom;
  root.append(svg('line', { class: 'axis', x1: left, x2: width - MARGIN.right, y1: y, y2: y }));
  xAxis(root, { low: 0, high: highest, scale, x, width, y, title: `${scale.unit} of KV, all rows together` });
  return root;
}

function figure(title, about, draw, table) {
  const canvas = el('div', { class: 'canvas' });
  const node = el('figure', null, el('figcaption', null, el('h3', null, title), el('p', null, about)), canvas);
  if (table) node.append(table);
  return { node, redraw: () => canvas.replaceChildren(draw(canvas.clientWidth || 320)) };
}

function keyOfMarks() {
  const sample = (...shapes) => svg('svg', { width: 12, height: 14, 'aria-hidden': 'true' }, ...shapes);
  const lines = MARKS.map(({ key, dash }) =>
    el('span', null, sample(svg('line', { class: 'mark', x1: 6, x2: 6, y1: 0, y2: 14, 'stroke-dasharray': dash })), key));
  const mean = el('span', null, sample(svg('path', { class: 'mean', d: 'M6 2l4.5 5l-4.5 5l-4.5 -5z' })), 'mean');
  return el('p', { class: 'key' }, lines, mean);
}

function showCharts(section) {
  const figures = DATA.charts.map((chart) =>
    figure(chart.title, chart.about, (width) => histogram(chart, width), distributionTable(chart)));
  const rest = [
    ['KV before and after', 'What the edits left of the KV.', kvBars],
    ['Over the job', 'End-to-end latency of each row as it came to its end.', timeline],
  ];
  for (const [title, about, draw] of rest) {
    if (draw(400)) figures.push(figure(title, about, draw));
  }
  if (!figures.length) return;
  const grid = el('div', { class: 'charts' }, figures.map((each) => each.node));
  const heading = el('h2', { id: 'charts-title' }, 'Latency and throughput');
  section.append(heading, DATA.charts.length ? keyOfMarks() : el('p'), grid);
  let drawn = 0;
  const redraw = () => {
    if (grid.clientWidth === drawn) return;
    drawn = grid.clientWidth;
    for (const each of figures) each.redraw();
  };
  new ResizeObserver(redraw).observe(grid);
  redraw();
}
