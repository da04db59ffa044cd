//! Samples of machines that have left the machine database.

use api::Done;
use api::dominator::departing::*;
use model::tree::Time;

pub fn list_departing() -> ListDepartingReply {
    let machine = DepartingMachine {
        hostname: "web-1".to_owned(),
        since: Time { seconds: 6, nanoseconds: 7 },
        state: DepartingState::Undecided,
        due: Some(Time { seconds: 8, nanoseconds: 7 }),
        tasks: Some(2),
        resources: 3,
        who: "ann".to_owned(),
        why: "moved".to_owned(),
    };
    ListDepartingReply { machines: vec![machine] }
}

pub fn order_departing() -> (OrderDepartingRequest, Done) {
    let (hosts, who) = (vec!["web-*".to_owned()], "ann".to_owned());
    let order = DepartingOrder::Leave;
    (OrderDepartingRequest { hosts, order, why: "moved".to_owned(), who }, Done {})
}
