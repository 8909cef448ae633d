// A small server that follows a script.

import { createServer } from "node:http";
import type { AddressInfo } from "node:net";

const CODES: Record<number, string> = {
  400: "invalid_body",
  401: "unauthenticated",
  403: "forbidden",
  404: "lock_not_found",
  409: "lock_held",
  413: "body_too_large",
  422: "new",
  429: "rate_limited",
};
const LEASE = { token: "1.1", fencing_token: 1, validity_ms: 30_000, elapsed_ms: 0, waiters: 2 };

/** A status may come with further fields of the problem. */
type Status = number | [number, object];
type Script = Partial<Record<"POST" | "PATCH" | "DELETE", Status[]>>;

export interface Scripted extends AsyncDisposable {
  url: string;
  /** The method and the idempotency key of each request. */
  seen: [string, string | undefined][];
  /** The bodies of the POSTs. */
  bodies: { wait_ms: number; owner?: string; priority?: number; queue?: string }[];
}

/**
 * A gateway that answers each method with the next status of its script; the last one repeats. 0
 * closes the connection without an answer, 502 is a proxy's page.
 */
export async function scripted(script: Script): Promise<Scripted> {
  const seen: Scripted["seen"] = [];
  const bodies: Scripted["bodies"] = [];
  const server = createServer((request, response) => {
    const pieces: Buffer[] = [];
    request.on("data", (piece: Buffer) => pieces.push(piece));
    request.on("end", () => {
      if (request.method === "POST") {
        bodies.push(JSON.parse(Buffer.concat(pieces).toString()));
      }
      seen.push([request.method!, request.headers["idempotency-key"] as string | undefined]);
      const statuses = script[request.method as keyof Script]!;
      const next = statuses.length > 1 ? statuses.shift()! : statuses[0]!;
      const [status, more] = typeof next === "number" ? [next, {}] : next;
      if (status === 0) {
        request.socket.destroy();
        return;
      }
      const problem = { type: "t", title: "t", status, code: CODES[status], detail: "d", ...more };
      const page = JSON.stringify(status < 300 ? LEASE : problem);
      response.writeHead(status, { "content-type": "application/json" });
      response.end(status === 204 ? undefined : status === 502 ? "<html>" : page);
    });
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  return {
    url: `http://127.0.0.1:${port}`,
    seen,
    bodies,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

export const methods = ({ seen }: Scripted): string[] => seen.map(([method]) => method);
