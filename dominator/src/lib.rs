//! The central controller: it keeps every machine equal to its image.
//!
//! The modules are layers, and each uses only those below it: [`daemon`] puts the parts together,
//! [`interface`] answers callers, [`inputs`] reads the machine database, [`runtime`] carries out
//! what [`core`] decides, and [`storage`] saves what must survive a restart.
//! `docs/ARCHITECTURE.md` has the map, `docs/OPERATING.md` the statuses that operators see.
//!
//! # Invariants
//!
//! * A machine gets no call but polls before [`core::identity`] has judged what it says of itself.
//! * No Commit is sent without a granted claim. Every claim is given back in bounded time.
//! * Every Commit passes [`runtime::commit_gate`], which `disable-updates` and pauses close. When
//!   an order to close it has returned, no Commit is on its way.
//! * An order, and an update, is recorded in [`storage`] before it is carried out.
//! * `domtool plan` ([`runtime::fleet`]) only reads from machines, and writes nothing.

pub mod core;
pub mod daemon;
pub mod inputs;
/// What others see of the dominator.
pub mod interface {
    pub mod api;
    pub mod metrics;
    pub mod pages;
}
/// Carries out what [`core`] decides: [`runtime::fleet`] owns the machines and takes orders,
/// [`runtime::driver`] runs the state machine of one machine. The other modules are what drivers
/// share.
pub mod runtime {
    pub mod claim_service;
    pub mod clock;
    pub mod commit_gate;
    pub mod computed;
    pub mod dial_limiter;
    pub mod driver;
    pub mod fleet;
    pub mod history;
    pub mod identities;
    pub mod images;
    pub mod interned;
    pub mod operator_program;
    pub mod permits;
    pub mod recent;
    pub mod saver;
    pub mod shared;
    pub mod task_orders;
    pub mod unused;
    pub mod webhooks;
}
pub mod storage;
