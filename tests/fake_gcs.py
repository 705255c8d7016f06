"""As much of Google Cloud Storage as gcsfs and TensorStore ask for, in memory.

The JSON API: objects are put whole, with a generation each; conditions on it are kept.
"""

import contextlib
from http import server
import itertools
import json
import re
import threading
from urllib import parse


def start() -> str:
  """The address of a store with nothing in it; it goes with the process."""
  handler = type('Handler', (_Handler,), {'objects': {}, 'parts': {}, 'turn': threading.Lock()})
  store = server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  store.daemon_threads = True
  threading.Thread(target=store.serve_forever, daemon=True).start()
  return f'http://127.0.0.1:{store.server_port}'


class _Handler(server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  generations = itertools.count(1)
  objects: dict[str, tuple[bytes, int]]  # content and generation
  parts: dict[str, bytes]  # of uploads that go on
  turn: threading.Lock

  def log_message(self, *said):
    pass

  def setup(self):
    super().setup()
    self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

  def _request(self):
    """The name of the object, none of a bucket, and what is asked."""
    url = parse.urlsplit(self.path)
    name = re.search(r'/b/[^/]+/o/?(.*)', url.path)
    self.asked = dict(parse.parse_qsl(url.query))
    return parse.unquote(name[1]) if name else ''

  def _answer(self, status, body=b'', **headers):
    if isinstance(body, dict):
      body = json.dumps(body).encode()
    self.send_response(status)
    for key, value in headers.items():
      self.send_header(key.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    with contextlib.suppress(BrokenPipeError):  # TensorStore does not read all that it asks for
      self.wfile.write(body)

  def _described(self, name):
    content, generation = self.objects[name]
    return {'name': name, 'size': str(len(content)), 'generation': str(generation)} | {
      'updated': '2026-01-01T00:00:00.000Z',
      'timeCreated': '2026-01-01T00:00:00.000Z',
    }

  def _refused(self, name, otherwise=412):
    """Whether a condition on the generation does not hold; 0 is that of no object."""
    generation = str(self.objects[name][1]) if name in self.objects else '0'
    if self.asked.get('ifGenerationMatch', generation) != generation:
      self._answer(412, {})
      return True
    if self.asked.get('ifGenerationNotMatch') == generation:
      self._answer(otherwise)
      return True
    return False

  def do_GET(self):
    name = self._request()
    with self.turn:
      if not name:
        return self._answer(200, self._listed())
      if name not in self.objects:
        return self._answer(404, {'error': {'message': f'No such object: {name}'}})
      if self._refused(name, 304):
        return None
      if self.asked.get('alt') != 'media':
        return self._answer(200, self._described(name))
      content, generation = self.objects[name]
    headers, status = {'x_goog_generation': str(generation)}, 200
    if 'Range' in self.headers:
      first, last = re.match(r'bytes=(\d+)-(\d*)', self.headers['Range']).groups()
      first, last = int(first), min(int(last or len(content)), len(content) - 1)
      if first >= len(content):
        return self._answer(416)
      headers['Content_Range'] = f'bytes {first}-{last}/{len(content)}'
      content, status = content[first : last + 1], 206
    return self._answer(status, content, **headers)

  def _listed(self):
    begins, delimiter = self.asked.get('prefix', ''), self.asked.get('delimiter')
    first, last = self.asked.get('startOffset', ''), self.asked.get('endOffset')
    found, folders = [], set()
    for name in sorted(self.objects):
      if not name.startswith(begins) or name < first or (last and name >= last):
        continue
      inner, there, _ = name[len(begins) :].partition(delimiter) if delimiter else ('', '', '')
      if there:
        folders.add(begins + inner + delimiter)
      else:
        found.append(self._described(name))
    return {'items': found, 'prefixes': sorted(folders)}

  def do_POST(self):
    name, kind = self._request(), self.headers.get('Content-Type', '')
    body = self.rfile.read(int(self.headers['Content-Length'] or 0))
    with self.turn:
      source, is_move, target = name.partition('/moveTo/o/')
      if is_move and source not in self.objects:
        return self._answer(404, {})
      if is_move:
        self.objects[target] = self.objects.pop(source)[0], next(self.generations)
        return self._answer(200, self._described(target))
      if kind.startswith('multipart/'):
        limit = b'--' + re.search('boundary="?([^"]+)', kind)[1].encode()
        _, about, content, _ = body.split(limit)
        about, content = (part.partition(b'\n\n')[2] for part in (about, content))
        name, body = json.loads(about)['name'], content.removesuffix(b'\n')
      name = name or self.asked['name']
      if self.asked.get('uploadType') == 'resumable' and 'Content-Range' not in self.headers:
        place = f'http://{self.headers["Host"]}{self.path}'
        return self._answer(200, Location=place)
      if 'Content-Range' in self.headers:
        body = self.parts.pop(self.path, b'') + body
        if self.headers['Content-Range'].endswith('/*'):
          self.parts[self.path] = body
          return self._answer(308, Range=f'bytes=0-{len(body) - 1}')
      if not self._refused(name):
        self.objects[name] = body, next(self.generations)
        self._answer(200, self._described(name))
    return None

  def do_DELETE(self):
    name = self._request()
    with self.turn:
      if name not in self.objects:
        self._answer(404, {})
      elif not self._refused(name):
        del self.objects[name]
        self._answer(204)
