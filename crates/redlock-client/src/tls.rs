//! Which certificates of gateways are trusted.
//!
//! The platform's verifier checks chains of certificates that end at an authority. It refuses an
//! authority's certificate that a server shows as its own. `openssl req -x509` makes such
//! certificates, and curl accepts one that is given as `--cacert`. So this module accepts exactly
//! the given certificate, byte for byte, if its names and dates are right.

use std::sync::Arc;
use std::time::Duration;

use rustls_platform_verifier::Verifier;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use x509_cert::Certificate;
use x509_cert::der::Decode;

/// The settings of TLS. Without a URL of HTTPS, the system's authorities are not read.
pub(crate) fn config(
    is_needed: bool,
    authorities: &[Vec<u8>],
    identity: Option<&[u8]>,
) -> Result<ClientConfig, String> {
    let provider = Arc::new(default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut trusted = Vec::new();
    for pem in authorities {
        let found = certificates(pem).map_err(|error| format!("the authority: {error}"))?;
        if found.is_empty() {
            return Err("the authority has no certificate (PEM)".into());
        }
        trusted.extend(found);
    }
    let config = if is_needed {
        let chains = Verifier::new_with_extra_roots(trusted.clone(), provider);
        let chains = chains.map_err(|error| format!("the authority: {error}"))?;
        let verifier = ServerVerifier { chains, trusted };
        config.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
    } else {
        config.with_root_certificates(RootCertStore::empty())
    };
    let Some(pem) = identity else { return Ok(config.with_no_client_auth()) };
    let of_client = |error: String| format!("the client certificate: {error}");
    let chain = certificates(pem).map_err(of_client)?;
    let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| of_client(error.to_string()))?;
    config.with_client_auth_cert(chain, key).map_err(|error| of_client(error.to_string()))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|error| error.to_string())
}

#[derive(Debug)]
struct ServerVerifier {
    chains: Verifier,
    /// The certificates that were given, of authorities or of gateways.
    trusted: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if !self.trusted.contains(end_entity) {
            let chains = &self.chains;
            return chains.verify_server_cert(
                end_entity,
                intermediates,
                server_name,
                ocsp_response,
                now,
            );
        }
        check_dates(end_entity, Duration::from_secs(now.as_secs()))?;
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

fn check_dates(certificate: &CertificateDer<'_>, now: Duration) -> Result<(), Error> {
    let parsed = Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding)?;
    let validity = parsed.tbs_certificate().validity();
    if now < validity.not_before.to_unix_duration() {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > validity.not_after.to_unix_duration() {
        return Err(CertificateError::Expired.into());
    }
    Ok(())
}
