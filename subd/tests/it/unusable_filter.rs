//! A saved filter that this release refuses: subd starts, and changes nothing until it gets
//! another.

use api::fault::FaultCode;
use api::subd::{
    Alarm, GetConfiguration, Limits, PollReply, SetConfiguration, SetConfigurationRequest,
};
use model::filter::Filter;
use model::scope::{Coverage, ScanSettings};
use rpc::client::CallError;

use crate::fixture::{Edit, Source, Sub, request, scan_by};

const TEXT: &str = "the filter that was set last cannot be used: line 2: `/b(` is no regular \
                    expression:";

fn fault_code(error: CallError) -> FaultCode {
    match error {
        CallError::Fault { source, .. } => source.code,
        error => panic!("{error}"),
    }
}

/// What subd says while it has no usable filter.
async fn assert_unusable(sub: &Sub) -> PollReply {
    let reply = sub.poll().await;
    let [Alarm::ScannerStalled(text)] = reply.alarms.as_slice() else {
        panic!("{:?}", reply.alarms);
    };
    assert!(text.starts_with(TEXT), "{text}");
    assert!(text.ends_with("until the dominator, or `subtool push-image`, sets another"), "{text}");
    assert_eq!((reply.scanned, &reply.scan, reply.counters.metadata_passes), (false, &None, 0));
    let (_, page) = sub.client.get("/").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("the filter that was set last cannot be used: line 2:"), "{page}");
    let refused = sub.client.call::<GetConfiguration>(&()).await.unwrap_err();
    assert_eq!(fault_code(refused), FaultCode::Unavailable);
    reply
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_scanned_or_changed_until_another_filter_is_set() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let filter = Filter::new(["/kept", "/b"]).unwrap();
    let settings = ScanSettings { coverage: Coverage::Full(filter), ..ScanSettings::default() };
    sub.client.call::<SetConfiguration>(&scan_by(settings.clone())).await.unwrap();
    let (before, tree) = sub.tree().await;
    let want = Edit::of(&tree, &source).directory("/new", 0o755).done();
    let (_, plan) = sub.plan(&want).await;
    let root = sub.root.clone();
    let _place = sub.stop().await;

    let state = root.join(".subd/state/state.json");
    let text = std::fs::read_to_string(&state).unwrap();
    std::fs::write(&state, text.replace("\"/b\"", "\"/b(\"")).unwrap();
    let sub = Sub::start_on(&root, &[]).await;
    let now = assert_unusable(&sub).await;
    assert_ne!(now.scope, before.scope);
    let stale = PollReply { scan: before.scan.clone(), ..now };
    let refused = sub.prepare(&request(1, &stale, &want, plan)).await.unwrap_err();
    assert_eq!(fault_code(refused), FaultCode::Stale);
    // Limits alone do not mend it, nor does a restart after the state was written again.
    let limits = Limits { cpu_percent: Some(7), ..Limits::default() };
    let request = SetConfigurationRequest { scan: None, limits: Some(limits) };
    sub.client.call::<SetConfiguration>(&request).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_unusable(&sub).await;
    sub.stop().await;
    let sub = Sub::start_on(&root, &[]).await;
    assert_unusable(&sub).await;

    // The settings in force without others: only the mark is removed.
    sub.client.call::<SetConfiguration>(&scan_by(ScanSettings::default())).await.unwrap();
    let mended = sub.poll_until(|reply| reply.scan.is_some()).await;
    assert_eq!((mended.alarms, mended.scan.unwrap().scope), (Vec::new(), mended.scope));
    sub.client.call::<SetConfiguration>(&scan_by(settings.clone())).await.unwrap();
    assert_eq!(sub.tree().await.1, tree);
    let kept = sub.client.call::<GetConfiguration>(&()).await.unwrap();
    assert_eq!((kept.scan, kept.limits), (settings, limits));
    sub.stop().await;
    source.stop().await;
}
