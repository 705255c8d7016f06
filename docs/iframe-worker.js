// Browsers refuse workers to pages that are opened from the disk. The worker of the search runs in
// a hidden frame instead, so that the search works there too.
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement('iframe')
      frame.hidden = true
      this.loaded = new Promise(resolve => { frame.onload = resolve })
      frame.srcdoc = `<script>postMessage = data => parent.postMessage(data, '*')</script>
        <script src="${url}"></script>`
      document.body.append(frame)
      this.frame = frame.contentWindow
      addEventListener('message', event => {
        if (event.source === this.frame) {
          this.dispatchEvent(new MessageEvent('message', {data: event.data}))
        }
      })
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent('message', {data})))
    }
  }
}
