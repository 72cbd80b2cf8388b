// Requests to the server. If a key is needed, it is sent in a header and never in a URL.

const KEPT = "kvtier-key";

export class Refused extends Error {
  constructor(status, message, retryS) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

export class Api {
  #key = sessionStorage.getItem(KEPT) ?? "";

  setKey(key) {
    this.#key = key;
    sessionStorage.setItem(KEPT, key);
  }

  get hasKey() {
    return this.#key !== "";
  }

  async get(path, signal) {
    const headers = this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
    const answer = await fetch(`dashboard/${path}`, { headers, signal, cache: "no-store" });
    if (answer.ok) return answer;
    let message = `the server responded with status ${answer.status}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      // A proxy's response has no JSON, so report only its status.
    }
    throw new Refused(answer.status, message, Number(answer.headers.get("retry-after")) || 0);
  }

  async json(path, signal) {
    return (await this.get(path, signal)).json();
  }

  // Yields the events of the live stream as [name, content], until the server ends it.
  async *events(signal) {
    const answer = await this.get("stream", signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const found = /^event: (.*)\ndata: (.*)$/.exec(part);
        if (found !== null) yield [found[1], JSON.parse(found[2])];
      }
    }
  }

  async download(kind, rangeS) {
    const answer = await this.get(`download.${kind}?range=${rangeS}`);
    const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = name === null ? `kvtier.${kind}` : name[1];
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}
