//! What others do to a master: its operator, who moves its name, and clients of another library.

use super::*;

impl Master {
    /// Its name leads to another process from now on, which has no data. Connections that are open lead to the old one.
    pub fn move_name(&self) {
        let mut process = self.process();
        if !process.up || process.stopped {
            return;
        }
        let memory = MemoryNode::new(format!("former n{}", self.index), self.clock.clone(), self.settings);
        memory.restore(self.memory.snapshot());
        process.former = Some((process.run, Arc::new(memory)));
        process.run += 1;
        (process.durable, process.was_replica) = (false, false);
        self.memory.wipe();
        self.recorder.loss(self.index);
        self.recorder.situation("names that moved");
    }

    /// The process that had the name before ends.
    pub fn end_former(&self) {
        let mut process = self.process();
        let Some((run, _)) = process.former.take() else { return };
        let connections: Vec<_> = process.connections.iter().filter_map(Weak::upgrade).collect();
        drop(process);
        for connection in connections.iter().filter(|connection| connection.run == run) {
            connection.end("the connection was closed by the node");
        }
    }

    /// SET NX PX by another Redlock client: whether it was set.
    pub fn foreign_set(&self, name: u8, value: &[u8], ttl: Duration) -> bool {
        let keys = Keys::new(KEY_PREFIX, &lock_name(name));
        let answers = |process: &Process| process.up && !process.stopped && !process.is_replica;
        let is_free = answers(&self.process()) && self.memory.run(&Op::Inspect { keys: keys.clone() }) == Vote::Missing;
        is_free && self.memory.set_foreign(&keys.lock, value, Some(ttl))
    }

    /// Compare and delete by that client.
    pub fn foreign_delete(&self, name: u8, value: &[u8]) {
        let keys = Keys::new(KEY_PREFIX, &lock_name(name));
        if let Vote::Found(holding) = self.memory.run(&Op::Inspect { keys: keys.clone() })
            && holding.record.as_bytes() == value
        {
            self.memory.set_foreign(&keys.lock, value, Some(Duration::ZERO));
        }
    }
}
