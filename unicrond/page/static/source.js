// Where everything that the page shows comes from: one coordinator, or one replayed log; both answer alike.
//
// * The view is asked for anew when entries have come, once a second at most; entries come as server-sent events.
// * A stream that ends is opened again after its last entry, sooner at first, every 5 s at last.
// * A replayed log has a moment (`at_us`), and no stream.
// All addresses are relative: the page works behind a path prefix.

const ENTRIES_MAX = 5000;
const BACKLOG = 2000;
const VIEW_MS = 1000;
const HEALTH_MS = 5000;

export class Refused extends Error {
  constructor(text, status) { super(text); this.status = status; }
}

export class Source extends EventTarget {
  constructor() {
    super();
    this.token = sessionStorage.getItem("token") ?? "";
    this.view = null;          // the last one that came
    this.names = [];
    this.entries = [];         // the newest, oldest first
    this.connected = false;
    this.replay = null;        // {from_us, until_us, last_seq} of a replayed log
    this.atUs = null;
    this.waiting = false;
    this.asked = 0;
    this.dirty = true;
  }

  async ask(path, body) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
    const answer = await fetch(this.at(path), options);
    if (!answer.ok) {
      let text = `HTTP ${answer.status}`;
      try { text = (await answer.json()).error ?? text; } catch { /* not ours */ }
      throw new Refused(text, answer.status);
    }
    return answer.json();
  }

  /** The path, with the moment that is looked at. */
  at(path) {
    if (this.atUs === null) return path;
    return `${path}${path.includes("?") ? "&" : "?"}at_us=${this.atUs}`;
  }

  setToken(token) { this.token = token; sessionStorage.setItem("token", token); }

  async start() {
    await this.look();
    if (this.replay) { await this.readEntries(); return; }
    this.follow();
    // An alarm of the head, and a log that takes nothing, bring no entry: they are asked for.
    const isOld = () => !this.replay && Date.now() - this.lookedMs > HEALTH_MS;
    setInterval(() => { if ((this.dirty || isOld()) && !this.waiting && !document.hidden) this.look().catch(() => {}); }, VIEW_MS);
    document.addEventListener("visibilitychange", () => { this.dirty = true; });
  }

  /** Ask for the view. */
  async look() {
    this.waiting = true;
    this.dirty = false;
    this.lookedMs = Date.now();
    const asked = ++this.asked;
    try {
      const told = await this.ask("v1/view");
      if (asked !== this.asked) return; // a later one is under way: the slider moves
      this.replay = told.replay ?? null;
      this.may = new Set(told.may);
      this.inject = told.inject;
      this.health = told.health;
      this.view = told.view;
      this.dispatchEvent(new Event("view"));
    } catch (error) {
      this.dirty = true;
      if (error instanceof Refused && error.status === 401) this.dispatchEvent(new Event("token"));
      else this.say(false, error.message);
      throw error;
    } finally { this.waiting = false; }
  }

  async moveTo(us) {
    this.atUs = us;
    await this.look();
    await this.readEntries();
  }

  /** Of a replayed log: the entries up to the moment. */
  async readEntries() {
    const seq = this.view.seq;
    const found = [];
    await this.read(`v1/events?after=${Math.max(0, seq - BACKLOG)}&until=${seq}`, (entry) => found.push(entry));
    if (seq !== this.view.seq) return;
    this.entries = found;
    this.dispatchEvent(new Event("entries"));
  }

  async follow() {
    let last = Math.max(0, this.view.seq - BACKLOG);
    for (let pause = 250; ; pause = Math.min(pause * 2, 5000)) {
      try {
        await this.read(`v1/events?after=${last}&follow=1`, (entry) => {
          last = entry.seq;
          pause = 250;
          this.take(entry);
        }, () => this.say(true, ""));
        this.say(false, "the coordinator has closed the stream");
      } catch (error) {
        if (error instanceof Refused && error.status === 401) { this.dispatchEvent(new Event("token")); return; }
        this.say(false, error.message);
      }
      await new Promise((wake) => setTimeout(wake, pause * (0.5 + Math.random())));
    }
  }

  take(entry) {
    this.entries.push(entry);
    if (this.entries.length > ENTRIES_MAX + 500) this.entries.splice(0, this.entries.length - ENTRIES_MAX);
    this.dirty = true;
    if (!this.telling) {
      this.telling = true;
      requestAnimationFrame(() => { this.telling = false; this.dispatchEvent(new Event("entries")); });
    }
  }

  say(connected, why) {
    if (connected === this.connected && why === this.why) return;
    this.connected = connected;
    this.why = why;
    this.dispatchEvent(new Event("health"));
  }

  /** Server-sent events; `fetch` and no EventSource, which cannot send a token. Ends with the stream, or `stop()`. */
  async read(path, take, opened, signal) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    const answer = await fetch(path, { headers, signal });
    if (!answer.ok) throw new Refused(`HTTP ${answer.status}`, answer.status);
    opened?.();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", kind = "", since = performance.now();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) take(Object.assign(JSON.parse(line.slice(6)), { type: kind }));
        if (performance.now() - since > 12) { // let a frame be drawn
          await new Promise((wake) => setTimeout(wake));
          since = performance.now();
        }
      }
    }
  }
}
