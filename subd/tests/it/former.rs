//! A dominator of the first release, which knows no refused changes, holds no machine and offers no
//! image.

use api::subd::UpdateOutcome;
use model::tree::text::to_text;

use crate::fixture::{Edit, Source, Sub, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_former_dominator_updates_and_repairs_also_after_a_path_was_blocked() {
    let (sub, source) = (Sub::start().await.called_formerly(), Source::start().await);
    let (_, empty) = sub.tree().await;
    let first = Edit::of(&empty, &source).directory("/d", 0o755).file("/d/f", "1").file("/ok", "1");
    let first = first.done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    std::fs::write(sub.at("/d/f"), "drift").unwrap();
    sub.rescanned().await;
    assert_eq!(sub.converge(2, &source, &first).await.outcome, UpdateOutcome::Done);
    assert_eq!(to_text(&sub.tree().await.1), to_text(&first));

    // It plans with the path again and again, and is told why it cannot be.
    let want = Edit::of(&first, &source).file("/ok", "2").file("/socket", "no socket").done();
    let socket = std::os::unix::net::UnixListener::bind(sub.at("/socket")).unwrap();
    let why = "/socket cannot be changed: it changed since it was scanned: something is there now";
    for id in 3..6 {
        let (_, plan) = sub.plan(&want).await;
        sub.fetch_for(id, &source, &plan).await;
        let (reply, plan) = sub.plan(&want).await;
        let reply = sub.prepare(&request(id, &reply, &want, plan)).await.unwrap();
        let outcome = reply.last_update.unwrap().outcome;
        assert_eq!(outcome, UpdateOutcome::NotPrepared(why.to_owned()));
    }
    // What is refused is among what cannot be read, which it shows.
    let unreadable = sub.poll().await.scan.unwrap().unreadable;
    let is_told = unreadable.iter().any(|(path, why)| {
        path.to_string() == "/socket" && why.starts_with("not changed: it changed since")
    });
    assert!(is_told, "{unreadable:?}");
    drop(socket);
    std::fs::remove_file(sub.at("/socket")).unwrap();
    sub.rescanned().await;
    for (id, tree) in [(6, &want), (7, &first), (8, &want)] {
        assert_eq!(sub.converge(id, &source, tree).await.outcome, UpdateOutcome::Done);
        assert_eq!(to_text(&sub.tree().await.1), to_text(tree));
    }
    source.stop().await;
    sub.stop().await;
}
