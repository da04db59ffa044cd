//! The errors of requests to a bucket, in few words.

use std::error::Error;

/// The longest shown detail of an answer, in characters.
const DETAIL_MAX: usize = 300;

/// Why a request to a bucket failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    #[error("the bucket {bucket} is unavailable ({detail}): try again later")]
    Unreachable { bucket: String, detail: String },
    #[error(
        "the bucket {bucket} denies access ({detail}): check the credentials of this server and \
         their permissions"
    )]
    Denied { bucket: String, detail: String },
    #[error("the bucket {bucket} is full ({detail}): give it more space, or delete images")]
    Full { bucket: String, detail: String },
    #[error("the bucket {bucket} cannot be used: {why}")]
    Unfit { bucket: String, why: &'static str },
    #[error("the bucket {bucket} refuses ({detail})")]
    Refused { bucket: String, detail: String },
}

impl BucketError {
    /// Classifies a failure of the library, which has the bucket's answer only in its text.
    pub(super) fn new(bucket: String, error: &dyn Error) -> Self {
        let (status, detail) = detail(error);
        let is = |codes: &[&str]| codes.iter().any(|code| detail.contains(code));
        match status {
            Some(401 | 403) => Self::Denied { bucket, detail },
            Some(507) => Self::Full { bucket, detail },
            _ if is(&["QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"]) => {
                Self::Full { bucket, detail }
            }
            Some(408 | 429 | 500..) | None => Self::Unreachable { bucket, detail },
            Some(_) => Self::Refused { bucket, detail },
        }
    }
}

/// Returns the status of the answer, if there was one, and the message or the cause.
fn detail(error: &dyn Error) -> (Option<u16>, String) {
    let text = error.to_string();
    let Some((_, answer)) = text.split_once("status code: ") else {
        let mut root = error;
        while let Some(source) = root.source() {
            root = source;
        }
        return (None, short(&root.to_string()));
    };
    let (line, body) = answer.split_once(": ").unwrap_or((answer, ""));
    let status = line.split(' ').next().and_then(|status| status.parse().ok());
    let part = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let detail = match (part("Code"), part("Message")) {
        (Some(code), Some(message)) => format!("{line}, {code}: {message}"),
        (Some(code), None) => format!("{line}, {code}"),
        _ => line.to_owned(),
    };
    (status, short(&detail))
}

fn short(text: &str) -> String {
    let plain = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    plain.take(DETAIL_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct TestError(&'static str);

    #[test]
    fn what_a_bucket_answers_has_a_meaning() {
        let bucket = || "s3://b".to_owned();
        let answer = "Generic S3 error: Error performing PUT http://h/b in 1ms - Server returned \
                      non-2xx status code: 403 Forbidden: <?xml?><Error><Code>AccessDenied</Code>\
                      <Message>no\n</Message></Error>";
        let detail = "403 Forbidden, AccessDenied: no ".to_owned();
        let expected = BucketError::Denied { bucket: bucket(), detail };
        assert_eq!(BucketError::new(bucket(), &TestError(answer)), expected);
        let of = |text| match BucketError::new(bucket(), &TestError(text)) {
            BucketError::Unreachable { detail, .. } => ("unreachable", detail),
            BucketError::Denied { detail, .. } => ("denied", detail),
            BucketError::Full { detail, .. } => ("full", detail),
            BucketError::Refused { detail, .. } => ("refused", detail),
            BucketError::Unfit { why, .. } => ("unfit", why.to_owned()),
        };
        #[rustfmt::skip]
        let table = [
            ("status code: 503 Service Unavailable: ",   "unreachable", "503 Service Unavailable"),
            ("status code: 507 Insufficient Storage: x", "full",        "507 Insufficient Storage"),
            ("status code: 404 Not Found: <Code>NoSuchBucket</Code>", "refused",
             "404 Not Found, NoSuchBucket"),
            ("connection refused",                       "unreachable", "connection refused"),
        ];
        for (text, kind, detail) in table {
            assert_eq!(of(text), (kind, detail.to_owned()));
        }
    }
}
