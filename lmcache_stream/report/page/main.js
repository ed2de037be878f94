const DATA = JSON.parse(document.getElementById('data').textContent);
const RUNS = DATA.runs;
const COLOURS = 8;
// A, B, ... Z, A2, ...
const LETTERS = RUNS.map((run, number) =>
  String.fromCharCode(65 + (number % 26)) + (number < 26 ? '' : Math.floor(number / 26) + 1));

showHead(document.getElementById('head'));
showOverview(document.getElementById('overview'));
const CHARTS = document.getElementById('charts');
if (DATA.charts.length || RUNS.some((run) => run.tokens_before)) showCharts(CHARTS);
else CHARTS.remove();
const LIST = makeList(document.getElementById('rows'));
