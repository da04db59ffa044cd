//! x
use super::Plan;
/// x
pub struct Have;
/// x
pub fn plan() -> Plan {
    Plan::default()
}
