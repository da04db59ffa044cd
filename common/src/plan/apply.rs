//! x
/// x
#[derive(Debug)]
pub struct ApplyError;
/// x
pub fn apply() {}
