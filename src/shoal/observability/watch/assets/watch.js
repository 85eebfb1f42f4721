// Shows the launcher's messages about the run. It asks no other process, and changes nothing.

import { chart, graph } from "./picture.js";

const DASH = "–";
const ENDED = ["lost", "failed", "finished"]; // states that a sentence explains
const by = (id) => document.getElementById(id);
const shown = { frame: null, whole: null };

function number(value) {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "string") return value;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(2);
  return Number.isInteger(value) ? String(value) : value.toPrecision(4);
}

function bytes(count) {
  if (count === null || count === undefined) return DASH;
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= unit) return `${(count / unit).toPrecision(3)} ${name}`;
  }
  return `${Math.round(count)} B`;
}

const perSecond = (count) => (count === null || count === undefined ? DASH : `${bytes(count)}/s`);

function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value < 1) return `${(1000 * value).toPrecision(3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

const inUnit = (value, unit) => {
  if (typeof value !== "number") return number(value);
  return unit === "s" ? seconds(value) : unit === "B/s" ? perSecond(value) : number(value);
};

function element(name, text, kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function figures(run) {
  const last = (name) => {
    const found = run.series.find((one) => one.name.toLowerCase().includes(name));
    const points = found ? found.points.filter((one) => run.at === undefined || one[0] <= run.at) : [];
    return points.length ? inUnit(points[points.length - 1][1], found.unit) : DASH;
  };
  const gone = ["lost", "failed", "finished", "left", "not there", "rejoining"];
  const going = run.agents.filter((one) => !gone.includes(one.state));
  const rates = run.agents.map((one) => one.out).filter((one) => one !== null);
  const steps = run.agents.map((one) => one.step).filter((one) => one !== null);
  const all = [
    ["agents", `${going.length} of ${run.agents.length}`],
    ["step", steps.length ? String(Math.max(...steps)) : DASH],
    ["loss, mean", last("loss")],
    ["consensus distance", last("consensus distance")],
    ["a step", last("step time")],
    ["sent", rates.length ? perSecond(rates.reduce((a, b) => a + b)) : DASH],
  ];
  by("figures").replaceChildren(
    ...all.map(([name, value]) => {
      const figure = element("div", "", "figure");
      figure.dataset.figure = name;
      figure.append(element("b", value), element("span", name));
      return figure;
    }),
  );
}

/** A row of a table; a narrow page, which has no room for columns, shows the heading before each number. */
function row(table, cells) {
  const made = document.createElement("tr");
  const headings = [...by(table).tHead.rows[0].cells].map((one) => one.textContent);
  made.append(
    ...cells.map(([text, kind], at) => {
      const cell = element("td", text, kind);
      cell.dataset.heading = headings[at];
      return cell;
    }),
  );
  return made;
}

function agents(run) {
  by("agents").tBodies[0].replaceChildren(
    ...run.agents.map((one) => {
      const kind = one.state.replace(/ /g, "-");
      const where = [one.host, one.pid].filter((part) => part !== null).join(", ") || DASH;
      const made = row("agents", [
        [one.again ? `${one.rank} (start ${one.again + 1})` : String(one.rank), ""],
        [[one.state, one.words].filter(Boolean).join(ENDED.includes(one.state) ? ": " : " "), `words ${kind}`],
        [number(one.step), "number"],
        [seconds(one.step_seconds), "number"],
        [number(one.loss), "number"],
        [perSecond(one.out), "number"],
        [perSecond(one.in), "number"],
        [where, ""],
      ]);
      made.dataset.rank = one.rank;
      made.dataset.state = one.state;
      return made;
    }),
  );
}

function edges(run) {
  by("edges").tBodies[0].replaceChildren(
    ...run.edges.slice(0, 200).map(([from, to, total, rate]) =>
      row("edges", [[String(from), ""], [String(to), ""], [bytes(total), "number"], [perSecond(rate), "number"]]),
    ),
  );
}

function series(run) {
  const order = (one) => (one.name.toLowerCase().includes("loss") ? 0 : one.unit ? 2 : 1);
  const drawn = run.series.filter((one) => one.points.length).sort((a, b) => order(a) - order(b));
  by("series").replaceChildren(
    ...drawn.map((one) => {
      const last = one.points[one.points.length - 1];
      const made = element("div", "", "chart");
      made.dataset.series = one.name;
      const head = element("p", "");
      const [mean, most] = one.unit === "B/s" ? ["all agents", "one agent at most"] : ["mean", "worst"];
      const label = (value) => inUnit(value, one.unit);
      const short = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
      const unitOf = { s: " s", "B/s": " B/s" }[one.unit] ?? "";
      const tick = (value) => (value === 0 ? `0${unitOf}` : short(label(value)));
      const lines = [element("span", `${mean} ${label(last[1])}`, "line mean-key")];
      if (one.points.some((each) => each[1] !== each[2])) lines.push(element("span", `${most} ${label(last[2])}`, "line worst-key"));
      head.append(element("b", one.name), ...lines);
      made.append(head, chart(one.points, tick, (at) => (at === 0 ? "0 s" : short(seconds(at)))));
      return made;
    }),
  );
  if (!drawn.length) by("series").replaceChildren(element("p", "Nothing is known yet.", "none"));
}

function events(run) {
  by("events").replaceChildren(
    ...[...run.events].reverse().map(([at, text, kind]) => {
      const made = element("li", "", kind);
      made.append(element("time", `${at.toFixed(1)} s`), element("span", text));
      return made;
    }),
  );
  if (!run.events.length) by("events").replaceChildren(element("li", "Nothing has happened yet.", "none"));
}

function status(text, bad = false) {
  by("status").textContent = text;
  by("status").className = bad ? "bad" : "";
}

function show() {
  const run = shown.whole;
  const frame = run.frames ? run.frames[shown.frame ?? run.frames.length - 1] : run;
  const now = { ...run, at: frame.at, agents: frame.agents, edges: frame.edges };
  by("title").textContent = run.title;
  document.title = run.title;
  status(run.over ?? `running for ${seconds(run.seconds)}`);
  figures(now);
  agents(now);
  edges(now);
  series(run);
  events(run);
  by("graph").replaceChildren(graph(now.agents, now.edges, bytes));
  if (run.frames) {
    by("moment").hidden = false;
    by("slider").max = run.frames.length - 1;
    if (shown.frame === null) by("slider").value = run.frames.length - 1;
    by("at").textContent = seconds(frame.at);
  }
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
}

by("slider").addEventListener("input", (event) => {
  shown.frame = Number(event.target.value);
  show();
});

const source = new EventSource("news");
source.onmessage = (event) => {
  shown.whole = JSON.parse(event.data);
  show();
  if (shown.whole.over !== null) source.close();
};
source.onerror = () => {
  source.close();
  status("the launcher has ended; this page shows its last message", true);
};
