const MARKS = [
  { key: 'p50', dash: null },
  { key: 'p90', dash: '5 3' },
  { key: 'p99', dash: '1.5 2.5' },
];

const seriesName = (series) => (series.run === null ? 'whole KV' : RUNS.length > 1 ? LETTERS[series.run] : '');

const wholeName = () => (RUNS.length > 1 ? 'whole KV' : 'whole');

function histogram(chart, width) {
  const isSingle = chart.series.length === 1;
  const lane = isSingle ? 110 : 58;
  const head = isSingle ? 18 : 27;
  const height = 4 + chart.series.length * (lane + head) + MARGIN.bottom;
  const scale = scaleOf(chart.unit, chart.high);
  const root = frame(width, height, `${chart.title}: histogram. The table has its figures.`);
  const right = width - MARGIN.right;
  const x = linear(chart.low, chart.high, MARGIN.left, right);
  chart.series.forEach((series, place) => {
    const bottom = 4 + (place + 1) * (lane + head);
    const area = { x, right, bottom, top: bottom - lane, scale };
    root.append(...bars(chart, series, area), ...labels(series, area));
  });
  const isCut = chart.series.some((series) => series.above);
  const title = `${scale.unit} (height: ${chart.counted}${isCut ? ', + n →: beyond the axis' : ''})`;
  xAxis(root, { low: chart.low, high: chart.high, scale, x, width, y: height - MARGIN.bottom, title });
  return root;
}

function bars(chart, series, { x, right, bottom, top, scale }) {
  const most = Math.max(...series.counts);
  const y = linear(0, most, bottom, top);
  const across = (kind, at) => svg('line', { class: kind, x1: MARGIN.left, x2: right, y1: at, y2: at });
  const beside = (value) =>
    textAt(MARGIN.left - 6, y(value) + 4, count(value), { class: 'tick', 'text-anchor': 'end' });
  const found = [across('grid', top), beside(most), ...(most > 1 ? [beside(0)] : [])];
  const step = (chart.high - chart.low) / series.counts.length;
  series.counts.forEach((number, index) => {
    if (!number) return;
    const [from, to] = [index, index + 1].map((each) => chart.low + each * step);
    const range = `${digits(from * scale.factor)} to ${digits(to * scale.factor)} ${scale.unit}`;
    const width = Math.max(1, x(to) - x(from) - 1);
    const size = { x: x(from) + 0.5, y: y(number), width, height: bottom - y(number) };
    const told = svg('title', null, `${range}: ${count(number)} ${chart.counted}`);
    found.push(svg('rect', { class: `bar ${colourOf(series.run)}`, ...size }, told));
  });
  return [...found, across('axis', bottom)];
}

// From left to right; one that would touch the one before is left out.
function labels(series, { x, right, bottom, top }) {
  const found = [];
  const name = seriesName(series);
  let free = MARGIN.left;
  if (name) {
    found.push(textAt(MARGIN.left, top - 5, name, { class: `name ${colourOf(series.run)}` }));
    free += (name.length + 1) * LETTER;
  }
  for (const { key, dash } of MARKS) {
    const at = x(series.distribution[key]);
    found.push(svg('line', { class: 'mark', x1: at, x2: at, y1: top - 1, y2: bottom, 'stroke-dasharray': dash }));
    if (at - 12 > free) {
      found.push(textAt(at, top - 5, key, { class: 'tick strong', 'text-anchor': 'middle' }));
      free = at + 12;
    }
  }
  const mean = x(series.distribution.mean);
  if (mean <= right) found.push(svg('path', { class: 'mean', d: `M${mean} ${bottom - 5}l4.5 5l-4.5 5l-4.5 -5z` }));
  if (series.above) {
    const attributes = { class: 'tick over', 'text-anchor': 'end' };
    found.push(textAt(right, top + 17, `+${count(series.above)} →`, attributes));
  }
  return found;
}

function distributionTable(chart) {
  const scale = scaleOf(chart.unit, chart.high);
  const isNamed = chart.series.length > 1 || RUNS.length > 1;
  const first = RUNS.length > 1 ? 'run' : 'KV';
  const head = [...(isNamed ? [first] : []), chart.counted, 'mean', 'p50', 'p90', 'p99'];
  const row = (series) => {
    const { count: number, mean, p50, p90, p99 } = series.distribution;
    const name = series.run === null ? wholeName() : badge(series.run) || 'edited';
    return el('tr', null,
      isNamed ? el('th', { scope: 'row' }, name) : null,
      el('td', null, count(number)),
      [mean, p50, p90, p99].map((value) => el('td', null, digits(value * scale.factor))));
  };
  return el('table', { class: 'figures' },
    el('caption', { class: 'hidden' }, `${chart.title} in ${scale.unit}`),
    el('thead', null, el('tr', null, head.map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', null, chart.series.map(row)));
}

function keyOfMarks() {
  const sample = (shape) => svg('svg', { width: 12, height: 14, 'aria-hidden': 'true' }, shape);
  const line = (dash) => svg('line', { class: 'mark', x1: 6, x2: 6, y1: 0, y2: 14, 'stroke-dasharray': dash });
  const diamond = svg('path', { class: 'mean', d: 'M6 2l4.5 5l-4.5 5l-4.5 -5z' });
  return el('p', { class: 'key' },
    MARKS.map(({ key, dash }) => el('span', null, sample(line(dash)), key)),
    el('span', null, sample(diamond), 'mean'));
}
