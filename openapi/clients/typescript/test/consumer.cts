// A user in CommonJS: takes a lock at the gateway of its first argument.

import redlock = require("redlock-gateway");

async function main(): Promise<void> {
  const client: redlock.Client = new redlock.Client(process.argv[2]!);
  const options: redlock.LockOptions = { ttlMs: 5_000 };
  await client.withLock("jobs/consumer", options, async (_, guard: redlock.Guard) => {
    const status: redlock.LockStatus = await client.status(guard.name);
    console.log(status.fencing_token === guard.fencingToken, guard.name);
    await client.lock(guard.name).catch((error: unknown) => console.log(error instanceof redlock.LockHeldError));
  });
}

void main();
