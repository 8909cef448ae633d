//! Options that several ways of measuring have in common.

use std::path::PathBuf;

use clap::{Args, Command};

#[derive(Debug, Args)]
pub(crate) struct Shared {
    /// The gateway's binary [default: redlock-gateway beside this program]
    #[arg(long, value_name = "PATH")]
    pub(crate) gateway: Option<PathBuf>,

    /// Passed on to every gateway, for instance --gateway-arg=--node-timeout=100ms; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) gateway_arg: Vec<String>,

    /// Also write every single measurement to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What a command measures with when it is given these options, which must be good ones.
pub(crate) fn parsed<T: Args>(args: &[&str]) -> T {
    let command = T::augment_args(Command::new("bench"));
    let matches = command.get_matches_from([&["bench"], args].concat());
    T::from_arg_matches(&matches).expect("no option is required")
}
