function figure(title, about, draw, table) {
  const canvas = el('div', { class: 'canvas' });
  const node = el('figure', null, el('figcaption', null, el('h3', null, title), el('p', null, about)), canvas);
  if (table) node.append(table);
  return { node, redraw: () => canvas.replaceChildren(draw(canvas.clientWidth || 320)) };
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
  const grid = el('div', { class: 'charts' }, figures.map((each) => each.node));
  const heading = el('h2', { id: 'charts-title' }, 'Latency and throughput');
  section.append(heading, DATA.charts.length ? keyOfMarks() : '', grid);
  let drawn = 0;
  const redraw = () => {
    if (grid.clientWidth === drawn) return;
    drawn = grid.clientWidth;
    for (const each of figures) each.redraw();
  };
  new ResizeObserver(redraw).observe(grid);
  redraw();
}
