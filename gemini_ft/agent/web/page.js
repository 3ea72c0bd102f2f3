"use strict";
// Shows /status.json: the accounts of all hosts as `gemini status --json` has them. Texts of hosts are set as text, never as markup.

const EVERY = 2000; // milliseconds between two looks
const SILENT = 8; // seconds after which a host that has not answered is away
const PHASES = ["training", "validation", "checkpoint_stall", "detection", "rendezvous", "waiting_for_storage", "restore", "replay"];
const CAUSES = ["", "died", "drain", "failed", "hang"]; // the more certain last: others end because of the first
const COLUMNS = ["host", "stream", "ranks", "step", "steps/s", "committed", "age", "lag", "held up", "memory", "stored", "uploads", "last failure"];
const at = (id) => document.getElementById(id);
let token = "";
let shown = null; // the newest document
let timer = 0;

// -- small parts

function made(name, text, attributes = {}) {
  const found = document.createElement(name);
  if (text !== undefined) found.textContent = text;
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

function drawn(name, attributes) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const count = (value) => (isNumber(value) ? String(Math.round(value)) : "-");
const words = (phase) => phase.replaceAll("_", " ");
const byPhase = (seconds) => Object.fromEntries(PHASES.map((phase) => [phase, seconds?.[words(phase)] || 0]));
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function time(seconds) {
  if (!isNumber(seconds)) return "-";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  for (const [unit, size, most] of [["s", 1, 120], ["min", 60, 120], ["h", 3600, 48]]) {
    if (seconds < size * most) return `${(seconds / size).toFixed(seconds / size < 10 ? 1 : 0)} ${unit}`;
  }
  return `${(seconds / 86400).toFixed(1)} d`;
}

function bytes(value) {
  if (!isNumber(value)) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) [value, step] = [value / 1024, step + 1];
  return `${step ? value.toFixed(value < 10 ? 2 : 1) : value} ${units[step]}`;
}

/** Sets the text of an element only where it is another one, so that a screen reader is not told of what stays. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces what an element holds, unless it looks the same. */
function fill(element, ...children) {
  const next = made("div");
  next.append(...children);
  if (element.innerHTML !== next.innerHTML) element.replaceChildren(...next.childNodes);
}

function figures(pairs) {
  const list = made("dl");
  for (const [name, value] of pairs) {
    const pair = made("div");
    pair.append(made("dt", name), made("dd", value));
    list.append(pair);
  }
  return list;
}

/** A bar of phases with its legend; `seconds`: by phase, of which the bar shows `most` at its whole width. */
function phases(seconds, most, label) {
  const parts = PHASES.filter((phase) => seconds[phase] > 0);
  const told = parts.map((phase) => `${words(phase)} ${time(seconds[phase])}`);
  const bar = drawn("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${told.join(", ")}` });
  const legend = made("ul", undefined, { class: "legend" });
  let begin = 0;
  parts.forEach((phase, number) => {
    const width = (1000 * seconds[phase]) / most;
    bar.append(drawn("rect", { class: phase, x: begin.toFixed(2), y: 0, width: width.toFixed(2), height: 10 }));
    begin += width;
    const mark = drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    mark.append(drawn("rect", { class: phase, width: 10, height: 10 }));
    const line = made("li");
    line.append(mark, told[number]);
    legend.append(line);
  });
  return [bar, legend];
}

const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

// -- what the accounts say

/** A row for each stream of each host; one for a host whose account cannot be read. */
function rowsOf(job) {
  const unheard = new Set(Object.values(job.hosts).flatMap(({ account }) => Object.values(account?.streams ?? {}).flatMap((of) => of.unheard ?? [])));
  const rows = [];
  for (const [host, { heard, account }] of Object.entries(job.hosts)) {
    const away = unheard.has(host) || heard > SILENT;
    for (const [stream, of] of Object.entries(account?.streams ?? { "-": null })) rows.push({ host, heard, account, stream, of, away });
  }
  for (const host of unheard) if (!(host in job.hosts)) rows.push({ host, heard: null, account: null, stream: "-", of: null, away: true });
  return rows.sort((one, other) => other.away - one.away || one.host.localeCompare(other.host, "en", { numeric: true }) || (one.stream < other.stream ? -1 : 1));
}

function cellsOf({ host, heard, account, stream, of, away }, now) {
  if (!of) return [host, stream, away ? "away" : "no account", ...Array(COLUMNS.length - 3).fill("-")];
  const { measures = {}, counters = {}, storage } = of;
  const spent = measures.seconds ?? {};
  const stepping = sum([spent.training, spent.checkpoint_stall]);
  const failures = Object.entries(measures.failed_at ?? {}).sort((one, other) => other[1] - one[1]);
  const stored = !storage ? "-" : storage.failing_since ? `fails for ${time(now - storage.failing_since)}` : storage.stored_at ? time(now - storage.stored_at) : "-";
  const ranks = Object.keys(account.workers ?? {});
  return [
    away ? `${host}, away${isNumber(heard) ? ` for ${time(heard)}` : ""}` : host,
    stream,
    ranks.length > 4 ? `${ranks[0]} to ${ranks.at(-1)}` : ranks.join(", ") || "none",
    count(measures.step),
    measures.step_seconds ? (1 / measures.step_seconds).toPrecision(3) : "-",
    count(of.committed),
    isNumber(of.committed_age) ? time(of.committed_age + heard) : "-",
    isNumber(measures.step) && isNumber(of.committed) ? count(Math.max(0, measures.step - of.committed)) : "-",
    stepping ? percent((spent.checkpoint_stall || 0) / stepping) : "-",
    account.memory ? `${bytes(account.memory.used)} of ${bytes(account.memory.limit)}` : "-",
    stored,
    count(counters.uploads) + (counters.failed_uploads ? `, ${counters.failed_uploads} failed` : ""),
    failures.length ? `${failures[0][0]}, ${time(now - failures[0][1])} ago; restarts ${sum(Object.values(measures.restarts ?? {}))}` : "-",
  ];
}

/** The failures that any host has seen, the newest first. What hosts saw of the end of the same attempt is one failure. */
function incidentsOf(rows) {
  const found = new Map();
  for (const { host, stream, of } of rows) {
    for (const failure of of?.measures?.run?.failures?.slice(-8) ?? []) {
      const key = `${stream} ${failure.incarnation}`;
      const one = found.get(key) ?? { stream, at: failure.at, cause: "", hosts: [], step: 0, resumed: null, seconds: {} };
      const [before, after] = [CAUSES.indexOf(one.cause), CAUSES.indexOf(failure.cause)];
      if (after > before) [one.cause, one.hosts] = [failure.cause, []];
      const where = failure.host || (failure.cause && host); // a host that is new has heard of it from others; earlier agents do not say it
      if (after >= before && where && !one.hosts.includes(where)) one.hosts.push(where);
      one.at = Math.min(one.at, failure.at);
      one.step = Math.max(one.step, failure.step);
      one.resumed = failure.resumed ?? one.resumed;
      const lost = byPhase(failure.seconds);
      for (const phase of PHASES) one.seconds[phase] = Math.max(one.seconds[phase] || 0, lost[phase] || 0);
      found.set(key, one);
    }
  }
  return [...found.values()].sort((one, other) => other.at - one.at);
}

// -- what is shown

function showJob(rows, job) {
  const parts = [];
  const streams = new Map(rows.filter(({ of }) => of?.leader).map((row) => [row.stream, row]));
  for (const row of rows) if (row.of?.job) streams.set(row.stream, row);
  for (const [stream, { of, host }] of streams) {
    const own = rows.filter((row) => row.stream === stream && row.of);
    const paces = own.map(({ of: { measures } }) => measures?.step_seconds).filter(isNumber);
    const ages = own.map(({ of: each, heard }) => each.committed_age + heard).filter(isNumber);
    const spares = [...own].sort((one, other) => one.heard - other.heard).map(({ account }) => account.spares).find((each) => each);
    if (streams.size > 1) parts.push(made("h3", `Stream ${stream}`));
    if (!of.job) parts.push(made("p", `Host ${of.leader} leads the commits: its page, if it has one, shows all hosts; this one shows host ${host} alone.`));
    parts.push(
      figures([
        ["led by", of.leader ?? "-"],
        ["hosts", count(of.job?.hosts)],
        ["ranks", count(of.job?.ranks ?? of.world_size)],
        ["absent hosts", count(of.job?.absent)],
        ["replicas left out", count(of.job?.left_out)],
        ["spares waiting", count(spares?.waiting)],
        ["hosts lacking", count(spares?.lacking)],
        ["steps per second", paces.length ? (1 / Math.max(...paces)).toPrecision(3) : "-"],
        ["committed step", count(of.committed)],
        ["age of the commit", ages.length ? time(Math.min(...ages)) : "-"],
        ["slow ranks", of.stragglers?.length ? of.stragglers.join(", ") : "none"],
        ["attempt", of.incarnation ?? "-"],
      ]),
    );
    if (of.finished) parts.push(made("p", "The job has finished its work."));
    if (of.hang) parts.push(made("p", `Last hang: ${of.hang.text}`, { class: "alarm" }));
  }
  fill(at("job"), ...(parts.length ? parts : [made("p", "No rank has joined yet.")]));
}

function showHosts(rows, now) {
  const body = at("hosts");
  rows.forEach((row, number) => {
    let line = body.children[number];
    if (!line) {
      line = made("tr", undefined, { role: "row" });
      COLUMNS.forEach((name, place) => line.append(place ? made("td", "", { role: "cell", "data-name": name }) : made("th", "", { role: "rowheader", scope: "row" })));
      body.append(line);
    }
    line.className = row.away ? "away" : "";
    cellsOf(row, now).forEach((text, place) => say(line.children[place], text));
  });
  while (body.children.length > rows.length) body.lastChild.remove();
}

function showFailures(rows, now) {
  const incidents = incidentsOf(rows).slice(0, 8);
  const most = Math.max(...incidents.map(({ seconds }) => sum(Object.values(seconds))), 1e-9);
  const lines = incidents.map((one) => {
    const lost = sum(Object.values(one.seconds));
    const line = made("li");
    const names = one.hosts.length > 3 ? `${one.hosts.length} hosts` : `${one.hosts.length > 1 ? "hosts" : "host"} ${one.hosts.join(", ")}`;
    const where = one.hosts.length ? `, seen by ${names}` : "";
    const back = one.resumed === null ? "not resumed yet" : `resumed at step ${one.resumed}`;
    line.append(made("h3", `${one.cause || "unknown cause"}, ${time(now - one.at)} ago`));
    line.append(made("p", `${one.stream}${where}: step ${one.step} had ended, ${back}; ${time(lost)} lost`), ...phases(one.seconds, most, "Time lost"));
    return line;
  });
  fill(at("failures"), ...(lines.length ? lines : [made("li", "None since these agents began.")]));
}

function showTime(rows) {
  const parts = [];
  for (const stream of new Set(rows.filter(({ of }) => of).map((row) => row.stream))) {
    const own = rows.filter((row) => row.stream === stream && row.of);
    const { host, of } = own.find((row) => row.of.job) ?? own[0];
    const seconds = byPhase(of.measures?.run?.seconds);
    const total = sum(Object.values(seconds));
    if (!total) continue;
    parts.push(made("p", `${stream}, as host ${host} sees it: ${percent((seconds.training || 0) / total)} of ${time(total)} was training.`), ...phases(seconds, total, `Time of ${stream}`));
  }
  fill(at("time"), ...(parts.length ? parts : [made("p", "Nothing is known yet.")]));
}

function showSpans(rows) {
  const own = rows.filter(({ of }) => of?.traffic);
  const select = at("whose");
  const names = own.map(({ host, stream }) => `${host} ${stream}`);
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => made("option", name, { value: name })));
    const leading = own.findIndex(({ of }) => of.job);
    select.value = names.includes(chosen) ? chosen : names[Math.max(0, leading)];
  }
  const traffic = own[names.indexOf(select.value)]?.of.traffic;
  const spans = traffic?.idle_spans ?? [];
  if (!spans.length || !traffic.step_seconds) {
    fill(at("spans"), made("p", "No steps have been observed here: there is one host, or the training has just begun."));
    return;
  }
  const scale = 1000 / traffic.step_seconds;
  const sent = sum(spans.map(([, , nbytes]) => nbytes));
  const outside = traffic.bytes ? traffic.bytes_outside / traffic.bytes : 0;
  const told = `A step takes ${time(traffic.step_seconds)}; in ${spans.length} spans of it, ${time(traffic.idle_seconds)} together, the training uses no network. The last snapshot sent ${bytes(sent)} in them. Of all bytes so far ${percent(outside)} went at other times; a snapshot is taken every ${traffic.interval === 1 ? "step" : `${traffic.interval} steps`}.`;
  const picture = drawn("svg", { class: "step", viewBox: "0 0 1000 60", preserveAspectRatio: "none", role: "img", "aria-label": "The idle spans of a step along its time; the filled part of each is the time that its bytes took" });
  for (const [begin, seconds, nbytes] of spans) {
    const place = { x: (scale * begin).toFixed(2), width: Math.max(1, scale * seconds).toFixed(2) };
    picture.append(drawn("rect", { class: "idle", y: 0, height: 60, ...place }));
    const took = traffic.bandwidth ? nbytes / traffic.bandwidth : nbytes && seconds;
    if (nbytes) picture.append(drawn("rect", { class: "sent", y: 22, height: 38, x: place.x, width: Math.max(1, scale * Math.min(took, seconds)).toFixed(2) }));
  }
  const list = made("details");
  list.append(made("summary", "The longest spans as a list"));
  const longest = made("ol");
  for (const [begin, seconds, nbytes] of [...spans].sort((one, other) => other[1] - one[1]).slice(0, 12)) {
    longest.append(made("li", `${time(seconds)} from ${time(begin)} on: ${bytes(nbytes)}`));
  }
  list.append(longest);
  list.open = at("spans").querySelector("details")?.open ?? false;
  const legend = made("ul", undefined, { class: "legend" });
  for (const [kind, text] of [["idle", "idle span"], ["sent", "bytes of the last snapshot"]]) {
    const mark = drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    mark.append(drawn("rect", { class: kind, width: 10, height: 10 }));
    const line = made("li");
    line.append(mark, text);
    legend.append(line);
  }
  fill(at("spans"), made("p", told), picture, legend, list);
}

function show() {
  const rows = rowsOf(shown);
  const away = [...new Set(rows.filter((row) => row.away).map(({ host }) => host))];
  say(at("run"), shown.run);
  document.title = `${away.length ? `(${away.length} away) ` : ""}${shown.run} - gemini-ft`;
  at("state").className = away.length ? "alarm" : "";
  say(at("state"), away.length ? `Away: ${away.join(", ")}` : "All hosts answer.");
  const parts = [() => showJob(rows, shown), () => showHosts(rows, shown.at), () => showFailures(rows, shown.at), () => showTime(rows), () => showSpans(rows)];
  for (const part of parts) {
    try {
      part();
    } catch (error) {
      console.warn("a host's account is not as expected:", error.message); // the other parts are shown
    }
  }
}

// -- the door

async function look() {
  clearTimeout(timer);
  let next = EVERY;
  if (token && !document.hidden) {
    try {
      const answer = await fetch("status.json", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", credentials: "omit" });
      if (answer.status === 401) return ask("This is not the token.");
      if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
      const isFirst = shown === null;
      shown = await answer.json();
      if (isFirst) next = EVERY / 4; // the other hosts have just been asked
      at("door").hidden = true;
      at("shown").hidden = false;
      if (isFirst) at("main").focus();
      show();
    } catch (error) {
      at("state").className = "alarm";
      say(at("state"), `The agent does not answer (${error.message}); what is shown is old. It is asked again.`);
    }
  }
  timer = setTimeout(look, next);
}

function ask(why) {
  token = "";
  shown = null;
  at("door").hidden = false;
  at("shown").hidden = true;
  at("state").className = why ? "alarm" : "";
  say(at("state"), why);
  at("token").value = "";
  at("token").focus();
}

function begin() {
  at("columns").append(...COLUMNS.map((name) => made("th", name, { role: "columnheader", scope: "col" })));
  at("door").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value.trim();
    look();
  });
  at("whose").addEventListener("change", () => shown && showSpans(rowsOf(shown)));
  document.addEventListener("visibilitychange", () => document.hidden || look());
  token = location.hash.startsWith("#token=") ? location.hash.slice(7) : "";
  if (token) history.replaceState(null, "", location.pathname); // neither the bar nor the history keeps it
  if (token) look();
  else ask("");
}

begin();
