//! Machines that are off, slow or talk nonsense delay nobody.

use rpc::tls::Security;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::fault::{Fault, FaultCode};
use api::subd::Poll;
use rpc::server::Router;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use crate::fake::{FakeSub, file, start, tree};
use crate::stage::{Stage, free_port, record, wait_until};

/// Listens, and does `act` with every connection.
pub async fn listen<F, Fut>(act: F) -> u16
where
    F: Fn(tokio::net::TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(act(stream));
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_machine_converges_beside_bad_ones() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let silent = listen(|stream| async move {
        let _held = stream;
        std::future::pending::<()>().await;
    })
    .await;
    let garbage = listen(|mut stream| async move {
        let _sent = stream.write_all(&[0xa5; 4_096]).await;
    })
    .await;
    let refusing = Router::new("subd", &Security::Insecure).method::<Poll, _>(|(), _, _| async {
        Err(Fault::new(FaultCode::Internal, "the disk is on fire"))
    });
    let (refusing, _guard) = start(refusing).await;
    let good = FakeSub::new(tree(""));
    let good_record = stage.sub("good", &good).await;
    let mut machines = vec![good_record];
    for number in 0..20 {
        machines.push(record(&format!("silent{number}"), silent));
        machines.push(record(&format!("garbage{number}"), garbage));
        machines.push(record(&format!("off{number}"), free_port()));
        machines.push(record(&format!("refusing{number}"), refusing.port()));
    }
    let machines: Vec<String> = machines
        .iter()
        .map(|record| format!("{{{record}, \"RequiredImage\": \"base\"}}"))
        .collect();
    let started = Instant::now();
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    stage.wait("good", Status::Synced, "base").await;
    let took = started.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(good.model.lock().unwrap().sub.tree, want);

    let off = stage.wait("off3", Status::Unreachable, "base").await;
    assert!(off.detail.contains("Connection refused"), "{}", off.detail);
    let refusing = stage.wait("refusing3", Status::PollFailed, "base").await;
    assert!(refusing.detail.contains("the disk is on fire"), "{}", refusing.detail);
    let garbage = stage.list().await.into_iter().find(|sub| sub.hostname == "garbage3").unwrap();
    assert!(
        matches!(garbage.status, Status::Unreachable | Status::PollFailed | Status::Connecting),
        "{garbage:?}"
    );
    let silent = stage.list().await.into_iter().find(|sub| sub.hostname == "silent3").unwrap();
    assert_eq!(silent.status, Status::Connecting);

    // A machine that is taken out of the database is let go of at once, whatever it does.
    let others: Vec<String> =
        machines.into_iter().filter(|record| !record.contains("silent")).collect();
    stage.write_mdb(&format!("[{}]", others.join(",")));
    let are_gone = async || stage.list().await.len() <= others.len();
    wait_until("the silent machines are let go of", are_gone).await;
}
