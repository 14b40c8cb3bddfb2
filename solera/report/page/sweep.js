const last = Math.max(1, ...data.charts.flatMap((chart) => chart.lines.flatMap((line) => line.steps.slice(-1))));
const name = "held-out accuracy";
const line = (one) => ({ ...one, name, of: data.names[one.run], colour: one.run, dash: Math.floor(one.run / COLOURS), percent: true });

document.getElementById("charts").append(...data.charts.map((chart) => new Chart({ ...chart, lines: chart.lines.map(line), range: [0, 1.02], last }).host));
chips(document.getElementById("legend"), data.names);
document.getElementById("footer").textContent = `Charts by uPlot ${data.uplot} (MIT licence).`;
themeButton();
