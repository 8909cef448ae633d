// A proxy in front of a real gateway that counts the renewals.

import { createServer, request } from "node:http";
import type { AddressInfo } from "node:net";

import type { Servers } from "./servers.js";

export interface Proxy extends AsyncDisposable {
  url: string;
  /** The number of PATCH /locks, and of PATCH /locks/{name}. */
  joint: number;
  single: number;
  /** Whether PATCH /locks gets no answer. */
  hangs: boolean;
  /** Replaces the first result of the next answer to PATCH /locks. */
  first: object | undefined;
}

/** A proxy in front of a gateway. `status` is its own answer to PATCH /locks, unless it is 0. */
export async function proxied(servers: Servers, status = 0): Promise<Proxy> {
  const target = new URL(servers.places.gateways[0]);
  const server = createServer((from, to) => {
    const { method, url, headers } = from;
    const isJoint = method === "PATCH" && url === "/locks";
    if (method === "PATCH") {
      proxy[isJoint ? "joint" : "single"]++;
    }
    if (isJoint && status !== 0) {
      from.resume();
      from.on("end", () => to.writeHead(status).end());
    } else if (isJoint && proxy.hangs) {
      from.resume();
    } else {
      const pass = request({ host: target.hostname, port: target.port, method, path: url, headers }, (answer) => {
        if (!isJoint) {
          to.writeHead(answer.statusCode!, answer.headers);
          answer.pipe(to);
          return;
        }
        const pieces: Buffer[] = [];
        answer.on("data", (piece: Buffer) => pieces.push(piece));
        answer.on("end", () => {
          const page = replaced(Buffer.concat(pieces).toString(), proxy);
          to.writeHead(answer.statusCode!, { "content-type": "application/json" }).end(page);
        });
      });
      pass.on("error", () => to.destroy());
      from.pipe(pass);
    }
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  const proxy: Proxy = {
    url: `http://127.0.0.1:${port}`,
    joint: 0,
    single: 0,
    hangs: false,
    first: undefined,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
  return proxy;
}

function replaced(page: string, proxy: Proxy): string {
  const { first } = proxy;
  if (first === undefined) {
    return page;
  }
  proxy.first = undefined;
  const { results } = JSON.parse(page);
  results[0] = { name: results[0].name, elapsed_ms: 0, ...first };
  return JSON.stringify({ results });
}
