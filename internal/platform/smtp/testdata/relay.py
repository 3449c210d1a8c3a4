# A mail relay for tests: aiosmtpd with STARTTLS and a password. It prints its
# port, and then each message as a line of JSON. usage: relay.py CERT KEY PORT
import asyncio, json, ssl, sys
from aiosmtpd.smtp import SMTP, AuthResult

tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(sys.argv[1], sys.argv[2])

asked = set()

class Inbox:
    async def handle_RCPT(self, server, session, envelope, address, options):
        if address.startswith("refused@"):
            return "550 there is no such mailbox"
        if address.startswith("later@") and address not in asked:
            asked.add(address)
            return "451 greylisted, try again"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):
        print(json.dumps({"from": envelope.mail_from, "to": envelope.rcpt_tos, "tls": session.ssl is not None,
                          "user": session.auth_data.decode() if session.auth_data else "", "data": envelope.content.decode()}), flush=True)
        return "250 kept"

def check(server, session, envelope, mechanism, data):
    ok = data.login == b"lull" and data.password == b"secret word"
    return AuthResult(success=ok, handled=ok, auth_data=data.login if ok else None)

async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(Inbox(), tls_context=tls, require_starttls=True, authenticator=check, auth_required=True), "127.0.0.1", int(sys.argv[3]))
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()

asyncio.run(main())
