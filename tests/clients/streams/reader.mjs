// Writes what eventsource delivers of a stream, until the lock was released: reader.mjs URL
import { EventSource } from "eventsource";

const source = new EventSource(process.argv[2]);
for (const kind of ["message", "snapshot", "held", "released"]) {
  source.addEventListener(kind, (event) => {
    console.log(JSON.stringify([event.type, event.data]));
    if (kind === "released") {
      source.close();
    }
  });
}
