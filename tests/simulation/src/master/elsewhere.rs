//! What other parties do to a master. Its operator moves its name or makes it a replica. Clients of
//! another Redlock library set and delete locks.

use super::*;

impl Master {
    /// REPLICAOF: the master becomes a replica and refuses writes from now on. With `data` it has
    /// received the data of another master.
    pub fn demote(&self, data: Option<Snapshot>) {
        self.process().is_replica = true;
        if let Some(data) = data {
            self.recorder.loss(self.index);
            self.memory.restore(data);
        }
    }

    /// REPLICAOF NO ONE: the replica becomes a master again.
    pub fn promote(&self) {
        let mut process = self.process();
        if std::mem::take(&mut process.is_replica) {
            process.was_replica = true;
            process.promotions += 1;
        }
    }

    /// Lets the master set this many more keys before it has no memory. `None` removes the limit.
    pub fn limit_sets(&self, left: Option<u32>) {
        self.memory.limit_sets(left);
    }

    /// Moves the name to a new process. Open connections still lead to the old one. With
    /// `with_file` the new process has the old one's data until now; this needs a master that syncs
    /// every write. Otherwise the new process has no data. Returns false if the master cannot be
    /// moved.
    pub fn move_name(&self, with_file: bool) -> bool {
        let mut process = self.process();
        if !process.up
            || process.stopped
            || with_file && (!process.durable || process.former.is_some())
        {
            return false;
        }
        let memory =
            MemoryNode::new(format!("former n{}", self.index), self.clock.clone(), self.settings);
        memory.restore(self.memory.snapshot());
        process.former =
            Some(Former { run: process.run, durable: process.durable, memory: Arc::new(memory) });
        process.run += 1;
        process.was_replica = false;
        self.recorder.situation("names that moved");
        if !with_file {
            process.durable = false;
            self.memory.wipe();
            self.recorder.loss(self.index);
        }
        true
    }

    /// Ends the old process, which had the name before the move. Returns false if there is none.
    pub fn end_former(&self) -> bool {
        let mut process = self.process();
        let Some(Former { run, .. }) = process.former.take() else { return false };
        let connections: Vec<_> = process.connections.iter().filter_map(Weak::upgrade).collect();
        drop(process);
        for connection in connections.iter().filter(|connection| connection.run == run) {
            connection.end("the connection was closed by the node");
        }
        true
    }

    /// SET NX PX by a client of another Redlock library. Returns whether the key was set.
    pub fn foreign_set(&self, name: u8, value: &[u8], ttl: Duration) -> bool {
        let keys = Keys::new(KEY_PREFIX, &lock_name(name));
        let answers = |process: &Process| process.up && !process.stopped && !process.is_replica;
        let is_free = answers(&self.process())
            && self.memory.run(&Op::Inspect { keys: keys.clone() }) == Vote::Missing;
        is_free && self.memory.set_foreign(&keys.lock, value, Some(ttl))
    }

    /// The release of that client: it deletes the key if the value is still its own.
    pub fn foreign_delete(&self, name: u8, value: &[u8]) {
        let keys = Keys::new(KEY_PREFIX, &lock_name(name));
        if let Vote::Found(holding) = self.memory.run(&Op::Inspect { keys: keys.clone() })
            && holding.record.as_bytes() == value
        {
            self.memory.set_foreign(&keys.lock, value, Some(Duration::ZERO));
        }
    }
}
