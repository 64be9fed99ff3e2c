"use strict";
// Draws every figure in the page's colours, and again when these or the width change.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(given) {
  const axis = { gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, exponentformat: "e" };
  return {
    ...given,
    template: {
      layout: {
        xaxis: { ...axis, showgrid: false, ticks: "outside", tickcolor: css("--line") },
        yaxis: axis,
        font: { color: css("--text"), size: 12, family: getComputedStyle(document.body).fontFamily },
        legend: { orientation: "h", traceorder: "normal", yref: "container", yanchor: "bottom", y: 0, x: 0, itemwidth: 30 },
        hoverlabel: { bgcolor: css("--box"), bordercolor: css("--line"), font: { color: css("--text") } },
        hovermode: "closest",
      },
    },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 44, r: 12, t: 8, b: 30 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

function draw(figure) {
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  const config = { responsive: true, displayModeBar: false };
  return Plotly.react(figure.querySelector(".plot"), data, themed(layout), config);
}

const inSight = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((entry) => entry.isIntersecting)) {
    inSight.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });

function drawAll() {
  document.querySelectorAll("figure.chart").forEach((figure) => inSight.observe(figure));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  inSight.disconnect();
  drawAll();
});
addEventListener("beforeprint", () => document.querySelectorAll("figure.chart").forEach(draw));
drawAll();
