// A proxy in front of a real gateway that sees the streams, and can end them.

import { createServer, request, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export interface Streams extends AsyncDisposable {
  url: string;
  /** The Lock-Token of each POST; undefined if it has none. */
  posts: (string | undefined)[];
  /** The number of PATCHes. */
  patches: number;
  /** The number of streams that are open. */
  readonly open: number;
  /** Ends every stream, after the event if one is given. */
  end(event?: string): void;
}

export async function streamed(gateway: string): Promise<Streams> {
  const target = new URL(gateway);
  const open = new Set<ServerResponse>();
  const server = createServer((from, to) => {
    const { method, url, headers } = from;
    if (method === "POST") {
      streams.posts.push(headers["lock-token"] as string | undefined);
      open.add(to);
    } else if (method === "PATCH") {
      streams.patches++;
    }
    const pass = request({ host: target.hostname, port: target.port, method, path: url, headers }, (answer) => {
      to.writeHead(answer.statusCode!, answer.headers);
      answer.on("data", (piece) => to.writableEnded || to.write(piece));
      answer.on("end", () => to.end());
    });
    pass.on("error", () => to.destroy());
    to.on("close", () => {
      open.delete(to);
      pass.destroy();
    });
    from.pipe(pass);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const streams: Streams = {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    posts: [],
    patches: 0,
    get open() {
      return open.size;
    },
    end(event) {
      for (const to of open) {
        if (event === undefined) {
          to.destroy();
        } else {
          to.end(event);
        }
      }
    },
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
  return streams;
}
