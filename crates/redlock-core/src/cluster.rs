//! The masters as a whole: the first start, restarts, and changes of the configuration.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `bootstrap` | the first start of a cluster | locks |
//! | `recovery` | gives a master that lost its locks those that may still be held | rounds |
//! | `catch_up` | gives a master that votes again the locks that were granted without it | rounds, quarantines |
//! | `schedule` | when recovery and catching up are due | what they do |
//! | [`reconfigure`] | an operator's change from one configuration to another | locks |

pub(crate) mod bootstrap;
pub(crate) mod catch_up;
pub mod reconfigure;
pub(crate) mod recovery;
pub(crate) mod schedule;
