"""A server of the two hubs' protocols, for repositories in memory, that can misbehave.

    with Hub({"org/model": {"config.json": b"{}"}}) as hub: os.environ["HF_ENDPOINT"] = hub.url
"""
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def is_large(path):
    return path.endswith((".safetensors", ".parquet"))


class Hub:
    """`faults` maps a part of a path to what happens there: an integer status, ("cut", bytes) once for each connection, ("wrong", n)
    for other content the first n times, ("busy", n) for n answers 429, ("body", bytes) for that body, ("endless",)
    for a body without end, ("redirect", url) to another server, ("header", dict) for 404 with those headers. `requests` holds (method, path, range, authorization)."""

    def __init__(self, models=None, datasets=None, faults=None, token=None):
        self.repositories = {"models": models or {}, "datasets": datasets or {}}
        self.faults = faults or {}
        self.token = token
        self.requests = []
        self.sent = 0  # bytes of bodies without end
        self.lock = threading.Lock()

    def __enter__(self):
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def downloads(self):
        return [r for r in self.requests if r[0] == "GET" and "/resolve/" in r[1]]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def send(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_json(self, value, **headers):
        self.send(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def answer(self):
        path = urllib.parse.unquote(self.path)
        with self.hub.lock:
            self.hub.requests.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
            fault = self.take_fault(path)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.send(401, X_Error_Message="Invalid username or password.")
        if isinstance(fault, int):
            return self.send(fault)
        if fault and fault[0] == "redirect":
            return self.send(302, Location=fault[1] + self.path)
        if fault and fault[0] == "header":
            return self.send(404, **fault[1])
        if fault and fault[0] == "body":
            return self.send(200, fault[1], Content_Type="application/json")
        if fault and fault[0] == "endless":
            return self.send_endless()
        if fault and fault[0] == "busy":
            return self.send(429, Retry_After="0.1")
        url = urllib.parse.urlsplit(path)
        query = urllib.parse.parse_qs(url.query)
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)", url.path):
            return self.answer_api(*match.groups(), query)
        if match := re.fullmatch(r"/api/v1/(models|datasets)/([^/]+/[^/]+)/repo(/files|/tree)?", url.path):
            return self.answer_modelscope(*match.groups(), query, fault)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            files = self.hub.repositories["datasets" if match[1] else "models"].get(match[2], {})
            return self.answer_file(files.get(match[4]), match[4], fault)
        return self.send(404)

    def send_endless(self):
        """At most 400 MB, for the test to end if nobody hangs up."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for _ in range(400):
                self.wfile.write(b"[" * (1 << 20))
                self.hub.sent += 1 << 20
        except OSError:
            pass

    def take_fault(self, path):
        for part, fault in self.hub.faults.items():
            if part in path:
                if isinstance(fault, tuple) and fault[0] in ("wrong", "busy"):
                    if fault[1] == 0:
                        return None
                    self.hub.faults[part] = (fault[0], fault[1] - 1)
                return fault
        return None

    def answer_api(self, kind, name, what, revision, query):
        files = self.hub.repositories[kind].get(name)
        if files is None or revision not in ("main", "v1", COMMIT):
            return self.send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if what == "revision":
            return self.send_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})
        entries = []
        for path, content in sorted(files.items()):
            entry = {"type": "file", "oid": git_hash(content), "size": len(content), "path": path}
            if is_large(path):
                entry["oid"] = git_hash(b"a pointer")
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 9}
            entries.append(entry)
        # Pages of two, so that there are several.
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + 2 < len(entries):
            headers["Link"] = f'<{self.hub.url}/api/{kind}/{name}/tree/{revision}?recursive=true&cursor={start + 2}>; rel="next"'
        return self.send_json(entries[start:start + 2], **headers)

    def answer_modelscope(self, kind, name, what, query, fault):
        files = self.hub.repositories[kind].get(name)
        if files is None:
            return self.send(404)
        if what:
            return self.send_json({"Code": 200, "Data": {"Files": [
                {"Path": path, "Size": len(content), "Sha256": sha256(content), "Type": "blob"} for path, content in files.items()]}})
        path = query["FilePath"][0]
        return self.answer_file(files.get(path), path, fault)

    def answer_file(self, content, path, fault):
        if content is None:
            return self.send(404, X_Error_Code="EntryNotFound")
        etag = sha256(content) if is_large(path) else git_hash(content)
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if is_large(path):
            headers["X_Linked_Etag"] = f'"{etag}"'
            headers["X_Linked_Size"] = str(len(content))
        if fault and fault[0] == "wrong":
            content = bytes(len(content))
        start, status = 0, 200
        if (asked := self.headers.get("Range")) and not (fault and fault[0] == "whole"):
            start, status = int(re.match(r"bytes=(\d+)-", asked)[1]), 206
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if fault and fault[0] == "cut" and self.command == "GET" and len(body) > fault[1]:
            self.send(status, body[:fault[1]], Content_Length=str(len(body)), **headers)
            self.close_connection = True
            return None
        return self.send(status, body, Content_Length=str(len(body)), **headers)
