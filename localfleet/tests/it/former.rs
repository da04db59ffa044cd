//! A subd of the first release: it answers only the methods that every release has.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use api::dominator::{Status, SubSummary};
use api::fault::{Fault, FaultCode};
use api::method::Method;
use api::subd::{
    Cleanup, Commit, Fetch, GetConfiguration, GetDirectories, Poll, Prepare, SetConfiguration,
};
use localfleet::fleet::client_of;
use model::display::error_chain;
use model::mdb::Machine;
use rpc::client::Client;
use rpc::server::{Router, serve};
use rpc::tls::Security;
use tokio_util::sync::CancellationToken;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

/// Longer than any poll waits.
const CALL_LIMIT: Duration = Duration::from_secs(120);

/// Answers `M` with what another server answers.
fn pass<M: Method<Request: Sync>>(router: Router<Client>) -> Router<Client> {
    router.method::<M, _>(|client: Client, _, request| async move {
        let reply = client.call_within::<M>(&request, CALL_LIMIT).await;
        reply.map_err(|error| match error.fault() {
            Some(fault) => fault.clone(),
            None => Fault::new(FaultCode::Unavailable, error_chain(&error)),
        })
    })
}

/// Answers at `address` with what the subd at `sub` answers, and knows no method of a later
/// release.
async fn former_subd(address: SocketAddr, sub: SocketAddr, stop: CancellationToken) {
    let client = client_of(sub, &Security::Insecure);
    let router = Router::new("subd", &Security::Insecure).with_state(client);
    let router = pass::<Fetch>(pass::<GetDirectories>(pass::<Poll>(router)));
    let router = pass::<Cleanup>(pass::<Commit>(pass::<Prepare>(router)));
    let router = pass::<SetConfiguration>(pass::<GetConfiguration>(router));
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    serve(listener, router, stop).await;
}

#[test]
fn a_former_subd_gets_images_and_repairs_and_says_what_is_in_its_way() {
    let mut scenario = Scenario::start_insecure(1);
    let addresses = scenario.fleet.addresses().clone();
    let [first, second, third] = addresses.subs;
    let address = SocketAddr::from((Ipv4Addr::new(first, second, third, 100), addresses.subd_port));
    let (stop, sub) = (CancellationToken::new(), scenario.fleet.subs[0].address);
    let serving = former_subd(address, sub, stop.clone());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let serving = runtime.spawn(serving);
    let require = |scenario: &Scenario, image: &str| {
        let machine = Machine {
            hostname: "sub-1".to_owned(),
            ip_address: Some(address.ip()),
            required_image: image.to_owned(),
            ..Machine::default()
        };
        scenario.fleet.replace_mdb(&[machine]).unwrap();
    };
    let trees = [1, 2].map(|version| {
        let tree = scenario.directory.path().join(version.to_string());
        trees::make(&tree, version);
        let users = format!("root:x:0:0::/:\npostfix:x:10{version}:8::/:\n");
        fs::write(tree.join("etc/passwd"), users).unwrap();
        scenario.add(&format!("test/{version}"), &tree);
        tree
    });
    for number in [1, 2, 1] {
        let image = format!("test/{number}");
        require(&scenario, &image);
        scenario.fleet.wait_synced(&image, CONVERGE_MAX, |_| {}).unwrap();
        scenario.verify(&trees[number - 1]);
    }
    // It cannot say what it keeps with old numbers of users.
    let output = scenario.fleet.domtool(&["plan", "sub-1", "--image", "test/2"]).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let unknown = "\nNOT KNOWN: how many files sub-1 keeps with old numbers (UID 101): its subd is \
                   of a release that cannot count them\n";
    assert!(output.status.code() == Some(3) && said.contains(unknown), "{said}");
    let root = scenario.fleet.subs[0].root.clone();
    let is_synced = |subs: &[SubSummary]| subs[0].status == Status::Synced;
    fs::write(root.join("etc/passwd"), "drift").unwrap();
    scenario.wait_until("drift is repaired", |subs| {
        is_synced(subs) && fs::read(root.join("etc/passwd")).unwrap() != b"drift"
    });

    // Nobody is told which change is refused: the update fails as a whole, with the reason.
    fs::remove_file(root.join("three")).unwrap();
    let socket = UnixListener::bind(root.join("three")).unwrap();
    scenario.wait_until("the obstacle is named", |subs| {
        subs[0].status == Status::UpdateFailed && subs[0].detail.contains("/three")
    });
    drop(socket);
    fs::remove_file(root.join("three")).unwrap();
    let retried = scenario.fleet.domtool(&["retry", "sub-1"]).unwrap();
    assert!(retried.status.success());
    scenario.wait_until("it is repaired without the obstacle", is_synced);
    scenario.verify(&trees[0]);

    // It cannot scan with the settings of another image for a plan.
    fs::write(scenario.directory.path().join("filter"), "/srv/data$\n").unwrap();
    scenario.add("test/3", &trees[0]);
    for (output, said) in [
        (
            scenario.fleet.domtool(&["plan", "sub-1", "--image", "test/3"]),
            "other-scan: it does not scan with the settings of test/3, and its subd is of a",
        ),
        (
            scenario.fleet.subtool(address, &["show-update", "test/3"]),
            "and its subd is of a release that cannot do so for a preview",
        ),
    ] {
        let output = output.unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && complaint.contains(said), "{complaint}");
    }

    let metrics = runtime.block_on(client_of(address, &Security::Insecure).get("/metrics"));
    let metrics = String::from_utf8(metrics.unwrap().1.to_vec()).unwrap();
    let unknown = "dominator_rpc_faults_total{method=\"unknown\",code=\"no-method\"}";
    assert!(metrics.contains(unknown), "later methods were tried: {metrics}");
    scenario.fleet.stop().unwrap();
    stop.cancel();
    runtime.block_on(serving).unwrap();
}
