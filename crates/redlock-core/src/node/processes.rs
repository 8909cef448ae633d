//! Which process each name leads to, as one gateway sees it. One process under two names (two addresses, two database
//! numbers) would be two votes that are lost together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Shared by the workers of one gateway's masters.
#[derive(Debug, Default)]
pub struct Processes(Mutex<BTreeMap<Arc<str>, String>>);

impl Processes {
    /// Notes that a name leads to a process.
    ///
    /// # Errors
    /// The other name that leads there: it was first, and keeps the process until it is seen to lead to another one.
    pub(super) fn claim(&self, name: &Arc<str>, run_id: &str) -> Result<(), Arc<str>> {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((other, _)) = names.iter().find(|(other, process)| *other != name && *process == run_id) {
            return Err(other.clone());
        }
        if names.get(name).is_none_or(|known| known != run_id) {
            names.insert(name.clone(), run_id.to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_name_under_which_it_was_seen_first_until_that_leads_to_another() {
        let (processes, a, b) = (Processes::default(), Arc::from("a"), Arc::from("b"));
        assert_eq!(processes.claim(&a, "1"), Ok(()));
        assert_eq!(processes.claim(&a, "1"), Ok(()));
        assert_eq!(processes.claim(&b, "1"), Err(a.clone()));
        assert_eq!(processes.claim(&a, "2"), Ok(()));
        assert_eq!(processes.claim(&b, "1"), Ok(()));
        assert_eq!(processes.claim(&a, "1"), Err(b));
    }
}
