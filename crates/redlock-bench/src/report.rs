//! What documents are made of. They are written as JSON, which `page` reads again, and as Markdown.
//!
//! | module | holds |
//! | --- | --- |
//! | `figures` | the figures of one turn |
//! | `stage` | a workload's contenders and their rounds, and its table |
//! | `machine` | the machine and the tree |
//! | `noise` | when a figure is worth nothing |
//! | `table`, `stats`, `json` | Markdown, medians, files |

pub(crate) mod figures;
mod json;
mod machine;
mod noise;
mod stage;
mod stats;
mod table;

pub(crate) use self::figures::{Circumstances, Figures};
pub(crate) use self::json::JsonFile;
pub(crate) use self::machine::{Machine, Source};
pub(crate) use self::noise::noise;
pub(crate) use self::stage::{Entry, StageReport};
pub(crate) use self::stats::{median, micros, millis, spread, thousands};
pub(crate) use self::table::Table;
