// What is drawn: the graph of the agents, and numbers over time. Every text is put in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

const [MIDDLE, FAR] = [240, 175];

/** Where each of so many agents is, on a circle; or what is so much further out. */
function places(count, out = 0) {
  return Array.from({ length: count }, (_, k) => {
    const angle = (2 * Math.PI * k) / count - Math.PI / 2;
    return [MIDDLE + (FAR + out) * Math.cos(angle), MIDDLE + (FAR + out) * Math.sin(angle)];
  });
}

/** A curve between two agents that begins and ends at their rims, bent to the left, so that both directions show. */
function curve([x0, y0], [x1, y1], radius, bend) {
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  const [cx, cy] = [(x0 + x1) / 2 + bend * uy * length, (y0 + y1) / 2 - bend * ux * length];
  const toward = (x, y, gap) => {
    const far = Math.hypot(cx - x, cy - y) || 1;
    return [x + ((cx - x) / far) * gap, y + ((cy - y) / far) * gap];
  };
  const begin = toward(x0, y0, radius + 3);
  const end = toward(x1, y1, radius + 10);
  const tip = toward(x1, y1, radius + 2);
  return { begin, control: [cx, cy], end, tip };
}

const point = ([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`;

function arrow({ begin, control, end, tip }, kind, width, title) {
  const group = make("g");
  group.append(make("path", { class: `edge ${kind}`, d: `M${point(begin)} Q${point(control)} ${point(end)}`, "stroke-width": width }));
  const [dx, dy] = [tip[0] - end[0], tip[1] - end[1]];
  const side = [-dy * 0.5, dx * 0.5];
  const corners = [tip, [end[0] + side[0], end[1] + side[1]], [end[0] - side[0], end[1] - side[1]]];
  group.append(make("polygon", { class: `head ${kind}`, points: corners.map(point).join(" ") }));
  group.append(make("title", {}, title));
  return group;
}

/** The agents, the used edges, and the waits between agents. */
export function graph(agents, edges, bytes) {
  const svg = make("svg", { viewBox: "-60 20 600 440", role: "img", "aria-label": "The agents and the edges between them" });
  const at = places(agents.length);
  const radius = Math.max(5, Math.min(22, 320 / Math.max(8, agents.length)));
  const labels = places(agents.length, radius + 8);
  const most = Math.max(1, ...edges.map((edge) => edge[3]));
  const drawn = [...edges].sort((a, b) => a[4] - b[4]);
  for (const [from, to, total, rate, now] of drawn) {
    if (!at[from] || !at[to] || from === to) continue;
    const width = now ? 1.5 + 3 * (rate / most) : 1;
    const title = `${from} to ${to}: ${bytes(total)} in all, ${bytes(rate)} a second`;
    const drawing = arrow(curve(at[from], at[to], radius, 0.12), now ? "now" : "", width, title);
    drawing.dataset.edge = `${from}-${to}`;
    drawing.dataset.now = now;
    svg.append(drawing);
  }
  for (const agent of agents) {
    for (const other of agent.waits_for) {
      if (!at[other] || other === agent.rank) continue;
      const { begin, control, end } = curve(at[agent.rank], at[other], radius, -0.08);
      const path = make("path", { class: "edge waits", d: `M${point(begin)} Q${point(control)} ${point(end)}` });
      path.dataset.waits = `${agent.rank}-${other}`;
      svg.append(path);
    }
  }
  for (const agent of agents) {
    const [x, y] = at[agent.rank];
    const group = make("g", { class: agent.state.replace(/ /g, "-") });
    const full = agent.state === "computing" ? " full" : "";
    group.append(make("circle", { class: `node${full}`, cx: x.toFixed(1), cy: y.toFixed(1), r: radius }));
    group.append(make("title", {}, `rank ${agent.rank}: ${agent.state} ${agent.words}`));
    if (radius > 8) {
      const text = make("text", { x, y: y + 4, "text-anchor": "middle" }, String(agent.rank));
      if (full) text.setAttribute("class", "inside");
      group.append(text);
    }
    if (agents.length <= 16) {
      const [to, down] = labels[agent.rank];
      const side = Math.abs(to - MIDDLE) < 20 ? "middle" : to > MIDDLE ? "start" : "end";
      const lower = side !== "middle" ? 4 : down > MIDDLE ? 10 : 0;
      group.append(make("text", { x: to.toFixed(1), y: (down + lower).toFixed(1), "text-anchor": side, class: "soft" }, agent.state));
    }
    svg.append(group);
  }
  return svg;
}

/** Round numbers between two, three or four of them. */
function ticks(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first;
  return Array.from({ length: count + 1 }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

const [LEFT, RIGHT, TOP, BOTTOM] = [58, 292, 8, 112];

/** One number over time, with axes: the mean of all agents, and the worst of them. */
export function chart(points, label, time) {
  const svg = make("svg", { viewBox: "0 0 300 132", role: "img" });
  svg.append(make("rect", { class: "frame", x: LEFT, y: TOP, width: RIGHT - LEFT, height: BOTTOM - TOP }));
  const numbers = points.filter((one) => typeof one[1] === "number");
  const values = numbers.flatMap((one) => [one[1], one[2]]).filter((one) => typeof one === "number");
  if (!numbers.length) return svg;
  const [first, last] = [numbers[0][0], numbers[numbers.length - 1][0]];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (high - low <= 1e-9 * Math.abs(high)) {
    const room = Math.abs(high) / 2 || 1;
    [low, high] = [low - room, high + room];
  }
  const x = (at) => LEFT + ((RIGHT - LEFT) * (at - first)) / (last - first || 1);
  const y = (value) => BOTTOM - 3 - ((BOTTOM - TOP - 6) * (value - low)) / (high - low);
  for (const value of ticks(low, high)) {
    const at = y(value).toFixed(1);
    svg.append(make("line", { class: "tick", x1: LEFT, x2: RIGHT, y1: at, y2: at }));
    svg.append(make("text", { class: "axis y", x: LEFT - 5, y: Number(at) + 3.5, "text-anchor": "end" }, label(value)));
  }
  const times = last > first ? ticks(first, last) : [first];
  for (const at of times) {
    const here = x(at).toFixed(1);
    svg.append(make("line", { class: "tick", x1: here, x2: here, y1: BOTTOM, y2: BOTTOM + 3 }));
    const anchor = Number(here) > RIGHT - 16 ? "end" : Number(here) < LEFT + 16 ? "start" : "middle";
    svg.append(make("text", { class: "axis x", x: here, y: BOTTOM + 15, "text-anchor": anchor }, time(at)));
  }
  for (const [column, kind] of [[2, "worst"], [1, "mean"]]) {
    const line = numbers.filter((one) => typeof one[column] === "number").map((one) => point([x(one[0]), y(one[column])]));
    svg.append(make("polyline", { class: kind, points: line.join(" ") }));
  }
  return svg;
}
