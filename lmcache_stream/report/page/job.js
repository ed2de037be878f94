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
  const highest = lanes.flatMap((lane) => lane.points).reduce((most, [, value]) => Math.max(most, value), 0);
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
    const few = points.length <= 100 ? ' few' : '';
    root.append(svg('path', { class: `dots${few} ${colourOf(number)}`, d: dots }));
    const crosses = failed.map((order) => `M${(x(order) - 3).toFixed(1)} ${bottom - lane - 10}l6 6m0 -6l-6 6`);
    if (RUNS.length > 1) {
      const style = `name ${colourOf(number)}`;
      root.append(textAt(4, bottom - lane - 3, LETTERS[number], { class: style }));
    }
    if (failed.length) {
      const told = svg('title', null, many(failed.length, 'failed row'));
      root.append(svg('path', { class: 'cross', d: crosses.join('') }, told));
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
    const style = RUNS.length > 1 ? `name ${colourOf(run.number)}` : 'tick strong';
    root.append(textAt(left, top + 13, label, { class: style }));
    ['before', 'after'].forEach((when, line) => {
      const y = top + 20 + line * (bar + 2);
      const value = run[`${key}_${when}`];
      const kind = when === 'before' ? ' pale' : '';
      const told = svg('title', null, `${when}: ${inBytes ? size(value) : many(value, 'token')}`);
      const place = { x: left, y, width: Math.max(1, x(value) - left), height: bar };
      const rect = svg('rect', { class: `bar ${colourOf(run.number)}${kind}`, ...place }, told);
      root.append(rect, textAt(left - 6, y + 13, when, { class: 'tick', 'text-anchor': 'end' }));
    });
  });
  const y = height - MARGIN.bottom;
  root.append(svg('line', { class: 'axis', x1: left, x2: width - MARGIN.right, y1: y, y2: y }));
  xAxis(root, { low: 0, high: highest, scale, x, width, y, title: `${scale.unit} of KV, all rows together` });
  return root;
}
