// Browsers start no worker from file://. Run it in a hidden frame, so that search works from disk.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.loaded = new Promise((done) => (script.onload = done));
      script.src = url;
      inside.document.body.append(script);
      this.postMessage = (data) =>
        this.loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
